"""The scheduler when pages run out: sequences wait or are preempted, and pages retire."""

from __future__ import annotations

import pytest

from tests.support.scheduling import (
    ABORT,
    Bench,
    crowd,
    reference,
    worker,
)
from trioserve.protocol import wire
from trioserve.requests.request import Sequence, State
from trioserve.testing import FakeWorker

# ---- capacity


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_resume_where_they_were(depth: int) -> None:
    fake = FakeWorker(num_pages=10, page_size=4)
    bench = Bench.make(fake, max_plans_in_flight=depth)
    sequences = crowd(bench)
    bench.drain()
    assert bench.core.statistics().num_preemptions > 0
    assert [sequence.output_ids for sequence in sequences] == [
        reference(fake, sequence) for sequence in sequences
    ]


def test_the_first_in_line_is_never_preempted() -> None:
    bench = Bench.make(worker(num_pages=10))
    first = crowd(bench)[0]
    while first.state is not State.FINISHED:
        bench.step()
        assert first.state is not State.WAITING
    assert bench.core.counters.num_preemptions > 0


def test_a_prompt_can_be_preempted_between_its_chunks() -> None:
    fake = FakeWorker(num_pages=15, page_size=2, max_num_batched_tokens=3)
    bench = Bench.make(fake)
    decoding = bench.submit([1], max_tokens=20)
    bench.step()
    prompt = bench.submit([2] * 24, max_tokens=2)
    while not bench.core.counters.num_preemptions:
        bench.step()
        assert prompt.state is not State.DECODE
    bench.drain()
    assert decoding.output_ids == reference(fake, decoding)
    assert prompt.output_ids == reference(fake, prompt)


def preempt_with_plans_in_flight() -> tuple[Bench, Sequence]:
    """Plan twice: the second plan names the preempted sequence, the first ends another one."""
    bench = Bench.make(
        worker(num_pages=9, page_size=2), max_plans_in_flight=3, enable_prefix_caching=False
    )
    bench.submit([1], max_tokens=12)
    bench.submit([2] * 5, max_tokens=3)
    victim = bench.submit([3] * 3, max_tokens=8)
    while not bench.core.counters.num_preemptions:
        if bench.plan() is None:
            bench.result()
    assert victim.state is State.PREEMPTED
    return bench, victim


def test_nobody_overtakes_who_was_preempted() -> None:
    bench, victim = preempt_with_plans_in_flight()
    late = bench.submit([4], max_tokens=1)
    while victim.state in (State.PREEMPTED, State.WAITING):
        assert late.state is State.WAITING
        if bench.plan() is None:
            bench.result()
    bench.drain()
    assert late.output_ids == [1]


def test_who_was_preempted_can_leave_before_being_back_in_line() -> None:
    bench, victim = preempt_with_plans_in_flight()
    assert bench.core.abort(victim, ABORT) is not None
    bench.drain()
    assert bench.core.statistics().pages_free == 9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_guaranteed_capacity_never_preempts(depth: int) -> None:
    bench = Bench.make(
        worker(num_pages=10), capacity_policy="guaranteed_no_evict", max_plans_in_flight=depth
    )
    sequences = crowd(bench)
    bench.step()
    assert len(bench.core.running) == 1
    bench.drain()
    assert bench.core.counters.num_preemptions == 0
    assert all(len(sequence.output_ids) == 20 for sequence in sequences)


def test_tokens_in_flight_of_a_preempted_sequence_are_delivered() -> None:
    bench = Bench.make(worker(num_pages=3, page_size=2), max_plans_in_flight=2)
    first = bench.submit([1], max_tokens=5)
    second = bench.submit([2], max_tokens=5)
    while bench.plan() is not None or bench.core.counters.num_preemptions == 0:
        if len(bench.results) == 2 and bench.core.counters.num_preemptions == 0:
            bench.result()
    before = len(second.output_ids)
    assert second.state is State.PREEMPTED
    assert second.seq_state not in list(bench.core.waiting)
    while second.state is State.PREEMPTED:
        bench.result()
    assert len(second.output_ids) > before
    bench.drain()
    assert first.output_ids == second.output_ids == [1, 2, 3, 4, 5]


# ---- what is in flight is out of reach


def test_pages_and_slots_in_flight_are_given_to_nobody() -> None:
    bench = Bench.make(
        worker(num_pages=2, max_num_seqs=2), max_plans_in_flight=2, enable_prefix_caching=False
    )
    leaving = bench.submit([1] * 7, max_tokens=1)
    bench.plan()
    bench.core.abort(leaving, ABORT)
    coming = bench.submit([2] * 7, max_tokens=1)
    closing = bench.plan()
    assert closing is not None
    assert wire.ints(closing.closed).tolist() == [0]
    assert closing.opened == []
    assert bench.core.statistics().pages_held == 2
    bench.result()
    plan = bench.plan()
    assert plan is not None
    (opened,) = plan.opened
    assert (opened.slot, opened.generation) == (0, 2)
    bench.drain()
    assert coming.output_ids == [7]


def test_who_needs_a_page_waits_for_those_that_retire_and_preempts_nobody() -> None:
    bench = Bench.make(
        worker(num_pages=7, page_size=2), max_plans_in_flight=2, enable_prefix_caching=False
    )
    staying = [bench.submit([number], max_tokens=6) for number in range(2)]
    leaving = bench.submit([3, 3, 3])
    bench.plan()
    for _ in range(3):
        bench.plan()
        bench.result()
    bench.core.abort(leaving, ABORT)
    assert bench.core.statistics().pages_free == 0
    plan = bench.plan()
    assert bench.rows(plan) == [], "it was given a page that is still in use"
    bench.result()
    assert len(bench.rows(bench.plan())) == 2
    bench.drain()
    assert bench.core.counters.num_preemptions == 0
    assert [sequence.output_ids[-1] for sequence in staying] == [6, 6]


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "finished"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_in_each_state_frees_everything(state: str, depth: int) -> None:
    bench = Bench.make(worker(max_num_batched_tokens=4), max_plans_in_flight=depth)
    sequence = bench.submit([1] * 10)
    while sequence.state.value != state:
        bench.step()
    first = bench.core.abort(sequence, ABORT)
    assert (first is None) == (state == "finished")
    assert bench.core.abort(sequence, ABORT) is None
    planned = len(bench.plans)
    bench.drain()
    assert all(not plan.row_slots for plan in bench.plans[planned:]), "computed after an abort"
    assert bench.worker.slots == {}
    statistics = bench.core.statistics()
    assert statistics.pages_held == statistics.num_running == statistics.num_waiting == 0
