"""Requests, a scheduler over them, and a worker without a model: what the cases are made of."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import attrs
import numpy as np

from gpu.mock import MockExecutor
from gpu.runner import Runner
from gpu.slots import SlotTable
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.request import Request, Sequence, Times, TokensPrompt
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.limits import SchedulerLimits

PAGE_SIZE = 16
PROMPT_TOKENS = 32
VOCAB_SIZE = 49152
MAX_TOKENS = 4000
"""The tokens of each sequence: more than there are steps in any measurement."""

_numbers = itertools.count()


def make_request(prompt: list[int], budget: StreamBudget, max_tokens: int = MAX_TOKENS) -> Request:
    """Return a request as the tokenizer leaves it: greedy, one output, a chat's stop ids."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = Request(
        id=f"request-{next(_numbers)}",
        prompt=TokensPrompt(tuple(prompt)),
        params=params,
        stream=Stream(budget),
        times=Times(arrived=0.0),
        prompt_ids=prompt,
    )
    sampler = SamplerParams(temperature=0.0, stop_ids=[0, 2])
    request.sequences.append(Sequence(request=request, sampler=sampler))
    return request


def make_limits(rows: int, pages_per_row: int = 256) -> SchedulerLimits:
    """Return limits with room for ``rows`` sequences in one step."""
    return SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows * PROMPT_TOKENS, 8192),
        max_model_len=1 << 14,
        vocab_size=VOCAB_SIZE,
        page_size=PAGE_SIZE,
        num_pages=rows * pages_per_row,
        max_plans_in_flight=1,
        enable_prefix_caching=True,
        scheduling_policy="fcfs",
        capacity_policy="max_utilization",
    )


def make_runner(rows: int, num_pages: int) -> Runner:
    """Return the worker's side, whose steps take no time."""
    slots = SlotTable(
        num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=1 << 14, vocab_size=VOCAB_SIZE
    )
    text = np.arange(500, 600, dtype=np.int32)
    executor = MockExecutor(wire.MockSteps(step_seconds=0.0), text)
    return Runner(executor, slots, max_num_batched_tokens=max(rows * PROMPT_TOKENS, 8192))


def result_of(plan: wire.Plan, generations: dict[int, int], token: int = 500) -> wire.StepResult:
    """Return a worker's answer to ``plan``, whose rows all sample."""
    slots = wire.ints(plan.row_slots)
    count = len(slots)
    return wire.StepResult(
        number=plan.number,
        slots=plan.row_slots,
        generations=wire.from_ints([generations[slot] for slot in slots.tolist()]),
        offsets=wire.from_ints(np.arange(count + 1, dtype=np.int32)),
        tokens=wire.from_ints(np.full(count, token, dtype=np.int32)),
        logprobs=wire.from_floats(np.full(count, np.nan, dtype=np.float32)),
        step_us=1000,
    )


async def _nothing() -> None:
    return None


@attrs.frozen(kw_only=True)
class Prepared:
    """One case at one size: ``run`` is what is timed, ``before`` comes before each time."""

    run: Callable[[], Awaitable[None]]
    before: Callable[[], Awaitable[None]] = _nothing


@attrs.define(eq=False)
class Loop:
    """A scheduler's core with ``rows`` sequences in decode, and what a worker would answer."""

    core: SchedulerCore
    requests: list[Request]
    generations: dict[int, int]
    plan: wire.Plan
    now: float = 0.0

    @classmethod
    def of(cls, rows: int) -> Loop:
        """Return the core once every prompt has been computed; each call is a step of decoding."""
        core = SchedulerCore(make_limits(rows), Metrics("micro"))
        budget = StreamBudget(1 << 40, 1 << 40)
        requests = [
            make_request([row + 1] + [7] * (PROMPT_TOKENS - 1), budget) for row in range(rows)
        ]
        for request in requests:
            core.submit(request, 0.0)
        plan = core.next_plan(0.0)
        assert plan is not None
        assert len(plan.opened) == rows
        generations = {opened.slot: opened.generation for opened in plan.opened}
        core.on_result(result_of(plan, generations), 0.0)
        return cls(core, requests, generations, plan)

    def next_plan(self) -> wire.Plan:
        self.now += 0.01
        plan = self.core.next_plan(self.now)
        assert plan is not None
        self.plan = plan
        return plan

    def result(self) -> wire.StepResult:
        return result_of(self.plan, self.generations)
