"""Rows of aborted sequences aren't computed if their plan hasn't begun."""

from __future__ import annotations

import math

import attrs
import numpy as np
import trio
import trio.testing

from tests.support.scheduling import ABORT, Bench, make_request
from trioserve.protocol import wire
from trioserve.requests.embedded import PREFIX, ContentIds, EmbeddedSpan
from trioserve.requests.request import Sequence
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_model import KV_SHAPE

PROMPT = list(range(1, 18))


def bench(depth: int) -> Bench:
    worker = FakeWorker(page_size=4, max_num_batched_tokens=8)
    return Bench.make(worker, max_plans_in_flight=depth)


def test_the_oldest_plan_in_flight_has_begun() -> None:
    side = bench(2)
    sequence = side.submit(PROMPT)
    assert side.core.drop(sequence) is None, "nothing of it is in flight"
    side.plan()
    assert side.core.drop(sequence) is None


def test_a_plan_behind_it_has_not() -> None:
    side = bench(2)
    sequence = side.submit(PROMPT)
    side.plan()
    side.plan()
    seq_state = sequence.seq_state
    assert side.core.drop(sequence) == wire.Drop(
        slot=seq_state.slot, generation=seq_state.generation, plan=1
    )
    side.result()
    assert side.core.drop(sequence) is None, "the second one is the oldest by now"


def test_what_another_sequence_reads_is_computed() -> None:
    side = bench(3)
    sequence = side.submit(PROMPT)
    side.plan()
    side.plan()
    other = side.submit(PROMPT)
    side.plan()
    assert other.seq_state.computed == 16, "it shares pages that the second plan computes"
    assert side.core.drop(sequence) is None
    side.core.abort(sequence, ABORT)
    side.drain()
    assert len(other.output_ids) == other.max_tokens


def test_what_an_adapter_s_prefix_writes_is_written() -> None:
    """Pages of virtual tokens count as computed, though no row of their sequence is."""
    side = bench(2)
    rows = np.zeros((9, 2 * math.prod(KV_SHAPE)), dtype=np.float32)
    spans = [attrs.evolve(EmbeddedSpan.of(0, rows, "float32"), kind=PREFIX)]
    contents = ContentIds()

    def submit(prompt: list[int]) -> Sequence:
        request = make_request([*([0] * 9), *prompt], max_tokens=3)
        request.put_in_front(spans)
        request.name_contents(contents)
        side.core.submit(request, side.now)
        return request.sequences[0]

    other = side.submit([7] * 8)
    side.plan()
    dropped = submit(PROMPT)
    plan = side.core.next_plan(side.now)
    assert plan is not None
    drop = side.core.drop(dropped)
    assert drop is not None
    side.worker.drop(drop)
    result = side.worker.step(plan)
    assert isinstance(result, wire.StepResult)
    side.results.append(result)
    side.core.abort(dropped, ABORT)
    again = submit(PROMPT)
    side.drain()
    assert again.request.num_cached_tokens == 8
    assert len(again.output_ids) == 3
    assert len(other.output_ids) == other.max_tokens


async def test_leaving_spares_the_chunk_that_waits(autojump_clock: trio.testing.MockClock) -> None:
    worker = FakeWorker(step_time=1.0, max_num_batched_tokens=16)
    computed: list[int] = []

    def note(_step: int, plan: wire.Plan) -> None:
        if wire.ints(plan.closed).size:
            computed.append(worker.slots[0].computed)

    worker.script = note
    async with open_fake_engine(lambda: worker, max_plans_in_flight=2) as engine:
        async with engine.generate([7] * 100, max_tokens=1):
            await trio.sleep(0.5)
            assert engine.statistics().scheduler.plans_in_flight == 2
        await trio.sleep(5)
        engine.check_integrity()
        assert computed == [16], "the second chunk was computed for nobody"
        completion = await engine.complete([7] * 100, max_tokens=3)
        assert len(completion.token_ids) == 3
