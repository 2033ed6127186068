"""Cases of plain functions: what a call of each does for ``rows`` rows, ready to be repeated."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import cast

import attrs
import numpy as np

from bench.servers import tokenizer
from gpu.mock import MockExecutor
from gpu.runner import Runner
from gpu.slots import SlotTable
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.prompts import TextPrompt, TokensPrompt
from trioserve.requests.request import Request, Sequence, SequenceOutput, Times
from trioserve.requests.stream import Chunk, Stream, StreamBudget
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.text.detokenizer import Detokenizer
from trioserve.text.tokenizer import Tokenizer

PAGE_SIZE = 16
PROMPT_TOKENS = 32
VOCAB_SIZE = 49152
MAX_TOKENS = 4000
"""The tokens of each sequence: more than there are steps in any measurement."""

_numbers = itertools.count()


def make_request(prompt: list[int] | str, budget: StreamBudget) -> Request:
    """Return a request before or after it is tokenized: greedy, one output, a chat's stop ids."""
    given = TextPrompt(prompt) if isinstance(prompt, str) else TokensPrompt(tuple(prompt))
    request = Request(
        id=f"request-{next(_numbers)}",
        prompt=given,
        params=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
        stream=Stream(budget),
        times=Times(arrived=0.0),
        prompt_ids=[] if isinstance(prompt, str) else prompt,
    )
    sampler = SamplerParams(temperature=0.0, stop_ids=[0, 2])
    request.sequences.append(Sequence(request=request, sampler=sampler))
    return request


Call = Callable[[], Awaitable[None] | None]


@attrs.frozen
class Prepared:
    """One case at one size: ``run`` is what is timed, ``before`` comes before each time."""

    run: Call
    before: Call = lambda: None


@attrs.define(eq=False)
class Loop:
    """A scheduler's core with ``rows`` sequences in decode, and a worker whose steps take no time.

    ``answer`` is the worker's to the prompts. Answers to later steps have other numbers alone,
    since every row gives a token in each.
    """

    core: SchedulerCore
    runner: Runner
    answer: wire.StepResult
    now: float = 0.0

    @classmethod
    def of(cls, rows: int, num_pages: int | None = None, feeds: Feeds | None = None) -> Loop:
        """Return the loop once every prompt has been computed; each plan is a step of decoding."""
        sizes = {"page_size": PAGE_SIZE, "num_pages": num_pages or 256 * rows}
        sizes |= {"max_model_len": 1 << 14, "vocab_size": VOCAB_SIZE}
        most = max(rows * PROMPT_TOKENS, 8192)
        limits = SchedulerLimits(
            max_num_seqs=rows,
            max_num_batched_tokens=most,
            max_plans_in_flight=1,
            enable_prefix_caching=True,
            scheduling_policy="fcfs",
            capacity_policy="max_utilization",
            **sizes,
        )
        executor = MockExecutor(wire.MockSteps(step_seconds=0.0), np.arange(500, 600, dtype="i4"))
        runner = Runner(executor, SlotTable(**sizes), max_num_batched_tokens=most)
        core, budget = (
            SchedulerCore(limits, Metrics("micro"), feeds),
            StreamBudget(1 << 40, 1 << 40),
        )
        for row in range(rows):
            core.submit(make_request([row + 1] + [7] * (PROMPT_TOKENS - 1), budget), 0.0)
        plan = core.next_plan(0.0)
        assert plan is not None
        assert len(plan.opened) == rows
        answer = runner.step(plan)
        core.on_result(answer, 0.0)
        return cls(core, runner, answer)

    def next_plan(self) -> wire.Plan:
        """Return the plan of a step that decodes every row."""
        self.now += 0.01
        plan = self.core.next_plan(self.now)
        assert plan is not None
        return plan

    def answer_to(self, number: int) -> wire.StepResult:
        """Return the answer to the plan ``number``."""
        return attrs.evolve(self.answer, number=number)


Case = Callable[[int], AbstractAsyncContextManager[Prepared]]


def plain(prepare: Callable[[int], Prepared]) -> Case:
    """Make a case of one that has nothing to close."""
    return lambda rows: contextlib.nullcontext(prepare(rows))


@plain
def pages(rows: int) -> Prepared:
    """Use the pool: a page for each row, taken, given back and acknowledged."""
    pool = PagePool(2 * rows)
    plan = 0

    def run() -> None:
        nonlocal plan
        plan += 1
        taken = pool.allocate(rows)
        pool.release(taken, plan)
        pool.acknowledge(plan)

    return Prepared(run)


@plain
def prefix_tree(rows: int) -> Prepared:
    """Look up as many prompts of eight pages in the tree, which has half of their pages."""
    pages_each = 8
    pool = PagePool(rows * pages_each)
    tree = PrefixCache(pool, PAGE_SIZE)
    half = pages_each // 2 * PAGE_SIZE
    prompts = [[row] * half + [rows + row] * (half + 1) for row in range(rows)]
    for prompt in prompts:
        tree.publish(("",), None, prompt, pool.allocate(pages_each), pages_each // 2, 1)
    columns = [wire.from_ints(prompt) for prompt in prompts]

    def run() -> None:
        for column in columns:
            assert len(tree.match(("",), column, 2).nodes) == pages_each // 2

    return Prepared(run)


@plain
def scheduler_and_wire(rows: int) -> Prepared:
    """Do a whole step of the engine's side: plan made and encoded, result decoded and taken.

    With metrics, and pages that are appended as sequences grow.
    """
    loop = Loop.of(rows)
    answer = b""

    def before() -> None:
        nonlocal answer
        answer = wire.encode(loop.answer_to(loop.core.next_number))

    def run() -> None:
        wire.encode(loop.next_plan())
        message = wire.decode(answer)
        assert isinstance(message, wire.StepResult)
        assert len(loop.core.on_result(message, loop.now)) == rows

    return Prepared(run, before)


@plain
def worker_side(rows: int) -> Prepared:
    """Do the worker's side of a step without the model: plan applied to slots, result made."""
    loop = Loop.of(rows)
    plan = loop.next_plan()

    def before() -> None:
        nonlocal plan
        loop.core.on_result(loop.answer_to(plan.number), loop.now)
        plan = loop.next_plan()

    def run() -> None:
        loop.runner.step(plan)

    loop.runner.step(plan)
    return Prepared(run, before)


class _Drain:
    """A stream that drops its chunks."""

    def push(self, chunk: Chunk) -> None:
        """Drop it."""


@plain
def detokenizer(rows: int) -> Prepared:
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

    return Prepared(run)
