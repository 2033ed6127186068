"""Requests, limits and the unbatched reference for tests of the scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import Any

import attrs
import numpy as np

from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import TokensPrompt
from trioserve.requests.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    Times,
)
from trioserve.requests.stream import Stream, StreamBudget, TokenLogprob
from trioserve.scheduler.beam_search import num_continuations
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.testing import FakeWorker
from trioserve.testing.fake_model import (
    TokenFunction,
    beam_logprobs,
    draw,
    fake_logprobs,
    hashed_token,
    prompt_piece,
)
from trioserve.testing.fake_reports import HIDDEN_SIZE, fake_state

__all__ = [
    "ABORT",
    "MAX_STEPS",
    "Bench",
    "counting",
    "crowd",
    "make_limits",
    "make_request",
    "reference",
    "reference_beams",
    "reference_logprobs",
    "reference_tensors",
    "sometimes_nothing",
    "worker",
]

MAX_STEPS = 3_000
"""Steps after which :meth:`Bench.drain` gives up."""
ABORT = Finish(FinishReason.ABORT)

_ids = itertools.count()


def make_request(
    prompt: Seq[int],
    *,
    max_tokens: int | None = 8,
    stop: Seq[int] = (),
    seed: int = 0,
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
    arrived: float = 0.0,
    **sampling: Any,
) -> Request:
    """Return a request as it comes from the tokenizer; ``sampling`` has more of its params."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, **sampling)
    request = Request(
        id=f"request-{next(_ids)}",
        prompt=TokensPrompt(tuple(prompt)),
        params=params,
        stream=Stream(StreamBudget(1 << 20, 1 << 20)),
        times=Times(arrived=arrived),
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        prompt_ids=list(prompt),
    )
    for index in range(params.n):
        sampler = SamplerParams(
            seed=seed,
            sequence_index=index,
            stop_ids=list(stop),
            min_tokens=params.min_tokens,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            logprob_token_ids=list(params.logprob_token_ids),
            allowed_token_ids=list(params.allowed_token_ids or ()),
            speculative=params.speculative and not params.returned_tensors,
            generation_logits=params.return_generation_logits,
        )
        if params.beam_width:
            count = num_continuations(params, sampler)
            sampler = attrs.evolve(sampler, processed_logprobs=True, logprobs=count)
        request.sequences.append(Sequence(request=request, index=index, sampler=sampler))
    return request


def make_limits(worker: FakeWorker, **changes: Any) -> SchedulerLimits:
    """Limits that fit ``worker``."""
    limits = SchedulerLimits(
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.max_model_len,
        vocab_size=worker.vocab_size,
        page_size=worker.page_size,
        num_pages=worker.num_pages,
        num_host_pages=worker.num_host_pages,
        max_row_tokens=worker.max_row_tokens,
        num_stages=worker.num_stages,
        hidden_size=HIDDEN_SIZE,
        max_output_tensor_bytes=1 << 20,
        max_plans_in_flight=1,
        enable_prefix_caching=True,
        scheduling_policy="fcfs",
        capacity_policy="max_utilization",
    )
    return attrs.evolve(limits, **changes)


def reference(worker: FakeWorker, sequence: Sequence) -> list[int]:
    """Return the output of ``sequence`` computed alone, one token after the other.

    It ends before the token -1.
    """
    context = list(sequence.request.prompt_ids)
    output: list[int] = []
    while len(output) < sequence.max_tokens:
        token = draw(worker.token, context, sequence.sampler)
        if token < 0:
            break
        context.append(token)
        output.append(token)
        if sequence.sampler.is_stop(token, len(output)):
            break
    return output


@attrs.frozen
class ExpectedBeam:
    """An output of :func:`reference_beams`."""

    score: np.float32
    total: np.float32
    tokens: tuple[int, ...]


def reference_beams(worker: FakeWorker, request: Request, max_tokens: int) -> list[ExpectedBeam]:
    """Return the outputs of a beam search, from all continuations of all beams in each step."""
    params, sampler = request.params, request.sequences[0].sampler
    width, penalty = params.beam_width, params.length_penalty
    beams: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    done: list[ExpectedBeam] = []
    for length in range(1, max_tokens + 1):
        every = [
            (-(total + logprob), place, token)
            for place, (tokens, total) in enumerate(beams)
            for token, logprob in enumerate(
                beam_logprobs([*request.prompt_ids, *tokens], sampler, worker.vocab_size)
            )
            if logprob > -np.inf
        ]
        before, beams = beams, []
        for rank, (negative, place, token) in enumerate(sorted(every)):
            tokens, total = (*before[place][0], token), np.float32(-negative)
            if length < max_tokens and not sampler.is_stop(token, length):
                beams.append((tokens, total))
            elif rank < width:
                done.append(ExpectedBeam(total / np.float32(length**penalty), total, tokens))
        beams = beams[:width]
        done = sorted(done, key=lambda each: -each.score)[:width]
        if not beams:
            break
        if len(done) == width:
            at_most = max_tokens if params.early_stopping == "never" and penalty > 0 else length
            reachable = beams[0][1] / np.float32(at_most**penalty)
            if params.early_stopping is True or reachable <= done[-1].score:
                break
    return done[: params.n]


def reference_logprobs(worker: FakeWorker, request: Request) -> list[TokenLogprob]:
    """Return the log-probabilities of the prompt of ``request``."""
    wanted = request.prompt_logprobs
    assert wanted is not None
    whole = PromptLogprobs(wanted.start, wanted.num_top, wanted.token_ids)
    tokens, sampler = request.prompt_ids, request.sequences[0].sampler
    if wanted.start < len(tokens):
        whole.add(prompt_piece(0, tokens, wanted.start, len(tokens), sampler, worker.vocab_size))
    return whole.entries(tokens)


def reference_tensors(worker: FakeWorker, sequence: Sequence) -> dict[str, Any]:
    """Return the output tensors that ``sequence`` could have, those of the prompt included."""
    prompt, output = sequence.request.prompt_ids, sequence.output_ids
    tokens, first = prompt + output, len(prompt) - 1
    contexts = [tokens[: place + 1] for place in range(max(len(tokens) - 1, len(prompt)))]
    states = np.array([fake_state(context) for context in contexts])
    logits = np.array([fake_logprobs(context, worker.vocab_size) for context in contexts])
    return {
        "prompt_hidden_states": states[: len(prompt)],
        "context_logits": logits[: len(prompt)],
        "hidden_states": states[first:],
        "generation_logits": logits[first:][: len(output)],
    }


def sometimes_nothing(vocab_size: int, seed: int) -> TokenFunction:
    """Like :func:`hashed_token`, but with ``seed`` there is now and then no token to draw."""
    token = hashed_token(7 * vocab_size)

    def maybe(context: list[int], sampler: SamplerParams) -> int:
        drawn = token(context, sampler)
        return -1 if sampler.seed == seed and drawn >= 6 * vocab_size else drawn % vocab_size

    return maybe


@attrs.define(eq=False)
class Bench:
    """A core and a worker side by side, with the plans and results that lie between them."""

    worker: FakeWorker
    core: SchedulerCore
    plans: list[wire.Plan] = attrs.field(factory=list)
    """Every plan made, in order."""
    results: list[wire.StepResult] = attrs.field(factory=list)
    """Results that the core hasn't been given."""
    outputs: list[SequenceOutput] = attrs.field(factory=list)
    now: float = 0.0
    check_interval: int = 1
    """Plans and results from one check of the core's integrity to the next."""
    _unchecked: int = 0

    @classmethod
    def make(cls, worker: FakeWorker, **limits: Any) -> Bench:
        return cls(worker, SchedulerCore(make_limits(worker, **limits)))

    def submit(self, *args: Any, **kwargs: Any) -> Sequence:
        """Submit a request of its own; its first sequence."""
        return self.submit_all(*args, **kwargs)[0]

    def submit_all(self, *args: Any, **kwargs: Any) -> list[Sequence]:
        """Submit a request; all of its sequences."""
        request = make_request(*args, **kwargs)
        self.core.submit(request, self.now)
        return request.sequences

    def replace_worker(self, worker: FakeWorker, **limits: Any) -> None:
        """Lose the worker with all that is in flight, and go on with another one."""
        self.core.recovery.on_worker_lost()
        self.results.clear()
        self.worker = worker
        self.core.recovery.restart(make_limits(worker, **limits))
        self.plans.clear()

    def plan(self) -> wire.Plan | None:
        """Make the next plan and have the worker run it; the core doesn't know the result yet."""
        plan = self.core.next_plan(self.now)
        self._check()
        if plan is not None:
            self._check_nothing_is_computed_twice(plan)
            self.plans.append(plan)
            result = self.worker.step(plan)
            assert isinstance(result, wire.StepResult)
            self.results.append(result)
        return plan

    def _check(self) -> None:
        self._unchecked += 1
        if self._unchecked >= self.check_interval:
            self._unchecked = 0
            self.core.check_integrity()

    def _check_nothing_is_computed_twice(self, plan: wire.Plan) -> None:
        """Check that a new sequence computes nothing that another plan, or this one, computes for
        others.
        """
        opened = {slot.slot for slot in plan.opened}
        for seq_state, _, _ in self.core.in_flight[-1].rows:
            # A beam that goes on with another token is opened again, with the pages that it had.
            if seq_state.slot in opened and seq_state.sequence.request.beams is None:
                match = self.core.memory.match(seq_state, plan.number + 1)
                found = [node.page for node in match.nodes]
                assert found == seq_state.pages[: len(found)], "a page is computed twice"

    def result(self) -> list[SequenceOutput]:
        """Give the core its oldest result."""
        outputs = self.core.on_result(self.results.pop(0), self.now)
        self.outputs += outputs
        self._check()
        return outputs

    def step(self) -> list[SequenceOutput]:
        """Fill up to the depth, then take one result."""
        while self.plan() is not None:
            pass
        return self.result() if self.results else []

    def drain(self) -> None:
        """Until there is nothing to do."""
        for _ in range(MAX_STEPS):
            if self.plan() is None and not self.results:
                return
            self.step()
        raise AssertionError("the sequences don't come to an end")

    def rows(self, plan: wire.Plan | None) -> list[tuple[int, int]]:
        """(slot, tokens) of every row of ``plan``."""
        assert plan is not None
        slots, counts = wire.ints(plan.row_slots), wire.ints(plan.row_counts)
        return list(zip(slots.tolist(), counts.tolist(), strict=True))


def counting(context: list[int], _: object) -> int:
    """Return the length of the context as the next token."""
    return len(context)


def worker(**options: Any) -> FakeWorker:
    return FakeWorker(**{"num_pages": 64, "page_size": 4, "token": counting, **options})


def crowd(bench: Bench) -> list[Sequence]:
    return [bench.submit([number] * 6, max_tokens=20) for number in range(5)]
