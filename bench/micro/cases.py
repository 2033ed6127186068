"""Cases of plain functions: what a call of each does for ``rows`` rows, ready to be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import cast

import attrs
import numpy as np

from bench.micro.fixtures import (
    PAGE_SIZE,
    PROMPT_TOKENS,
    VOCAB_SIZE,
    Loop,
    Prepared,
    make_request,
    make_runner,
)
from bench.micro.loops import link, server_sent_events, stream_fan_out
from bench.servers import tokenizer
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.request import SequenceOutput
from trioserve.requests.stream import Chunk, Stream, StreamBudget
from trioserve.scheduler import policy
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.result_validation import Results
from trioserve.text.detokenizer import Detokenizer
from trioserve.text.tokenizer import Tokenizer

Case = tuple[Callable[[], object], Callable[[], object]]
"""The function that is timed, and the one that comes before each time."""


def _nothing() -> None:
    return None


def share_out(rows: int) -> Case:
    """Share out with the policy: a step's tokens shared out among as many as decode."""
    remaining = np.ones(rows, dtype=np.int64)
    may_run = np.ones(rows, dtype=np.bool_)
    return lambda: policy.Share.out(remaining, may_run, 2 * rows, rows), _nothing


def pages(rows: int) -> Case:
    """Use the pool: a page for each row, taken, given back and acknowledged."""
    pool = PagePool(2 * rows)
    plan = 0

    def run() -> None:
        nonlocal plan
        plan += 1
        taken = pool.allocate(rows)
        pool.release(taken, plan)
        pool.acknowledge(plan)

    return run, _nothing


def prefix_tree(rows: int) -> Case:
    """Look up as many prompts of eight pages in the tree, which has half of their pages."""
    pages_each = 8
    pool = PagePool(rows * pages_each)
    tree = PrefixCache(pool, PAGE_SIZE)
    half = pages_each // 2 * PAGE_SIZE
    prompts = [[row] * half + [rows + row] * (half + 1) for row in range(rows)]
    for prompt in prompts:
        tree.publish(("",), None, prompt, pool.allocate(pages_each), pages_each // 2, 1)

    def run() -> None:
        for prompt in prompts:
            assert len(tree.match(("",), prompt, 2).nodes) == pages_each // 2

    return run, _nothing


def plan_message(rows: int) -> Case:
    """Encode a plan of as many decodes, and decode it as the worker does."""
    plan = Loop.of(rows).next_plan()

    def run() -> None:
        message = wire.decode(wire.encode(plan))
        assert isinstance(message, wire.Plan)
        wire.ints(message.row_slots).tolist()
        wire.ints(message.row_counts).tolist()

    return run, _nothing


def result_message(rows: int) -> Case:
    """Encode its result, decode it, and check it against the plan."""
    loop = Loop.of(rows)
    loop.next_plan()
    result, plan = loop.result(), loop.core.in_flight[0]

    def run() -> None:
        message = wire.decode(wire.encode(result))
        assert isinstance(message, wire.StepResult)
        Results.read(message, plan, VOCAB_SIZE)

    return run, _nothing


def scheduler_and_wire(rows: int) -> Case:
    """Do a whole step of the engine's side: plan made and encoded, result decoded and taken.

    With metrics, and pages that are appended as sequences grow.
    """
    loop = Loop.of(rows)
    answer = b""

    def before() -> None:
        # The plan of the step to come is known beforehand: every row decodes.
        nonlocal answer
        number = loop.core.next_number
        result = attrs.evolve(loop.result(), number=number)
        answer = wire.encode(result)

    def run() -> None:
        wire.encode(loop.next_plan())
        message = wire.decode(answer)
        assert isinstance(message, wire.StepResult)
        assert len(loop.core.on_result(message, loop.now)) == rows

    return run, before


def worker_side(rows: int) -> Case:
    """Do the worker's side of a step without the model: plan applied to slots, result made."""
    pages_each = 256
    runner = make_runner(rows, rows * pages_each)
    number = 1
    slots = wire.from_ints(np.arange(rows, dtype=np.int32))
    tokens = wire.from_ints([7] * PROMPT_TOKENS)
    fields = {"generation": 1, "tokens": tokens, "prompt_length": PROMPT_TOKENS, "computed": 0}
    sampler = SamplerParams(temperature=0.0, stop_ids=[0, 2])
    pages = [wire.from_ints(range(n * pages_each, (n + 1) * pages_each)) for n in range(rows)]
    opened = [
        wire.OpenSlot(slot=slot, pages=own, sampler=sampler, **fields)
        for slot, own in enumerate(pages)
    ]
    counts = wire.from_ints(np.full(rows, PROMPT_TOKENS, dtype=np.int32))
    runner.step(wire.Plan(number=1, opened=opened, row_slots=slots, row_counts=counts))
    ones = wire.from_ints(np.ones(rows, dtype=np.int32))

    def run() -> None:
        nonlocal number
        number += 1
        runner.step(wire.Plan(number=number, row_slots=slots, row_counts=ones))

    return run, _nothing


class _Drain:
    """A stream that drops its chunks."""

    def push(self, chunk: Chunk) -> None:
        """Drop it."""


def detokenizer(rows: int) -> Case:
    """Turn as many outputs of one token each into text and chunks."""
    words = tokenizer().encode(" the keeper wrote one line for every ship").ids
    delivering = Detokenizer(Tokenizer(tokenizer(), None), lambda *_: None, lambda *_: None)
    outputs = []
    for row in range(rows):
        request = make_request([7] * PROMPT_TOKENS, StreamBudget(0, 0))
        request.stream = cast(Stream, _Drain())
        outputs.append(SequenceOutput(request.sequences[0], (words[row % len(words)],)))

    def run() -> None:
        for output in outputs:
            delivering.deliver(output)

    return run, _nothing


def _plain(
    prepare: Callable[[int], Case],
) -> Callable[[int], AbstractAsyncContextManager[Prepared]]:
    """Make an async case of one that needs no event loop."""

    @contextlib.asynccontextmanager
    async def prepared(rows: int) -> AsyncIterator[Prepared]:
        run, before = prepare(rows)

        async def run_it() -> None:
            run()

        async def prepare_it() -> None:
            before()

        yield Prepared(run=run_it, before=prepare_it)

    return prepared


CASES: dict[str, Callable[[int], AbstractAsyncContextManager[Prepared]]] = {
    "policy": _plain(share_out),
    "pages": _plain(pages),
    "prefix tree": _plain(prefix_tree),
    "plan message": _plain(plan_message),
    "result message": _plain(result_message),
    "scheduler and wire": _plain(scheduler_and_wire),
    "worker's slots": _plain(worker_side),
    "detokenizer": _plain(detokenizer),
    "stream fan-out": stream_fan_out,
    "server-sent events": server_sent_events,
    "link round trip": link,
}
