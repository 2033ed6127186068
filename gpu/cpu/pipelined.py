"""Steps of several stages: this process computes the first one, and the last one answers later.

A step is submitted once its first stage is computed, so the next step's may follow while the
stages behind compute this one. What comes back is received by a thread, and the tokens are drawn
when the step is waited for. The scheduler plans no row whose token isn't known, so a row's slot has
all tokens before the one to draw when it is submitted. Drafts are found then, and verified when the
logits behind them are there.

A plan behind a step may close a slot of that step. Whatever the options of the slot need is kept
until the step's tokens are drawn.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from gpu._util.completions import Completions
from gpu.cpu.executor import CpuExecutor
from gpu.cpu.model import CpuModel, CpuSampler, Floats
from gpu.cpu.scores import score_prompt
from gpu.executor import NO_COPIES, Copies, Submission
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.stage_link import StageLink
from gpu.models.parallel.stage_times import no_times, with_head
from gpu.models.parallel.steps import ReturnResults, encode_step
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.drafting.drafter import DraftedStep
from gpu.sampling.drafting.sources import Draft
from gpu.sampling.drawn import DeviceTimes, Drawn
from gpu.sampling.output_tensors import TensorSpan, read_span
from gpu.sampling.pooled import PooledSpan
from gpu.sampling.prompt_logprobs import PromptSpan, prompt_piece
from gpu.slots import UNKNOWN_TOKEN, PlanError, Row, SlotTable
from trioserve.protocol.wire import TensorPiece

_NO_TOKENS = np.zeros(0, dtype=np.int32)


@attrs.define(eq=False, kw_only=True)
class StageResults:
    """The results of a step on the last stage, as they come back: an event that passes then."""

    link: RankLink
    stages: StageLink
    vocab_size: int
    hidden_size: int
    pools: Sequence[PooledSpan]
    scored: Sequence[PromptSpan]
    tensors: Sequence[TensorSpan]
    num_drawn: int
    """Number of rows that get a token, and of their drafts."""
    states: list[Floats] = attrs.field(init=False, factory=list)
    """Hidden states of each pooled span, [n, E]."""
    scores: list[list[npt.NDArray[Any]]] = attrs.field(init=False, factory=list)
    """The arrays of :func:`gpu.sampling.prompt_logprobs.prompt_piece` for each scored span."""
    pieces: list[TensorPiece] = attrs.field(init=False, factory=list)
    """Hidden states and logits of ``tensors``."""
    logits: Floats = attrs.field(init=False)
    """[num_drawn, V]."""
    took_us: npt.NDArray[np.int64] = attrs.field(init=False)
    """[P + 1], microseconds of each stage's layers, and of the head."""

    def synchronize(self) -> None:
        """Block until all has come; called by the thread that receives."""
        with self.link.in_step():
            for pool in self.pools:
                count = pool.stop_hidden - pool.first_hidden
                self.states.append(self._take(count, self.hidden_size))
            self._read_tensors(of_logits=False)
            for span in self.scored:
                places = np.arange(span.first_hidden + span.stop - span.start)
                self.scores.append(score_prompt(span, places, self._slice, self.vocab_size))
            self._read_tensors(of_logits=True)
            self.logits = self._take(self.num_drawn, self.vocab_size)
            self.took_us = self.stages.receive(no_times(self.stages))

    def _read_tensors(self, *, of_logits: bool) -> None:
        for span in self.tensors:
            if span.of_logits == of_logits:
                places = np.arange(span.stop_hidden)
                self.pieces.append(
                    read_span(span, places, self._states_of, self._slice, self.vocab_size)
                )

    def _states_of(self, places: npt.NDArray[np.int64]) -> Floats:
        return self._take(len(places), self.hidden_size)

    def _slice(self, places: npt.NDArray[np.int64]) -> Floats:
        return self._take(len(places), self.vocab_size)

    def _take(self, rows: int, columns: int) -> Floats:
        return self.stages.receive(np.empty((rows, columns), dtype=np.float32))


@attrs.frozen(eq=False, kw_only=True)
class _Step:
    """A step that the stages compute: the :class:`gpu.executor.Submission` of its executor."""

    executor: PipelinedExecutor
    drafted: DraftedStep
    results: StageResults | None
    """None for a step without rows."""
    numbers: frozenset[int] = frozenset()
    """Numbers of the slots that have a row."""
    idle_us: int = 0
    begun_us: int = 0
    """Microseconds in which pages were copied and drafts were found."""
    closing: list[int] = attrs.field(factory=list)
    """Slots that a later plan has closed."""

    @property
    def deferred(self) -> bool:
        """See :attr:`gpu.executor.Submission.deferred`."""
        return False

    def sample(self) -> None:
        """Raise: nothing is deferred."""
        raise AssertionError("a step of several stages isn't deferred")

    def wait(self) -> Drawn:
        """See :meth:`gpu.executor.Submission.wait`."""
        return self.executor.finish(self)


class PipelinedExecutor(CpuExecutor):
    """:class:`gpu.executor.Executor` over the first stage of a model.

    A slot that a step names is given to no other sequence before the step's result is out.

    Args:
        model: The first stage, which gives its states to the next one.
        sampler: As in :class:`~gpu.cpu.executor.CpuExecutor`.
        slots: The worker's.
        link: The messages to all ranks, and the ways to the other stages.
        hidden_size: The model's.
        adjuster: As in :class:`~gpu.cpu.executor.CpuExecutor`.
        note_times: Called with the times of each step; see :class:`StageTimes`.
    """

    def __init__(
        self,
        model: CpuModel,
        sampler: CpuSampler,
        slots: SlotTable,
        link: RankLink,
        hidden_size: int,
        adjuster: Adjuster | None = None,
        note_times: Callable[[npt.NDArray[np.int64]], None] = lambda _: None,
    ) -> None:
        super().__init__(model, sampler, slots, adjuster)
        assert link.stages is not None
        self._link = link
        self._stages = link.stages
        self._hidden_size = hidden_size
        self._note_times = note_times
        self._completions = Completions()
        self._steps: deque[_Step] = deque()
        """The steps that haven't been waited for."""

    @property
    def completions(self) -> int:
        """See :attr:`gpu.executor.Executor.completions`."""
        return self._completions.descriptor

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`; a slot of a step is closed behind it."""
        for step in reversed(self._steps):
            if number in step.numbers:
                step.closing.append(number)
                return
        super().close(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`. Returns when the first stage is computed."""
        began = time.perf_counter_ns()
        for row in rows:
            if row.slot.token(row.end - 1) == UNKNOWN_TOKEN:
                number = row.slot.number
                raise PlanError(f"slot {number} has a row before its token is known", number)
        # As long as other stages have nothing to compute, they don't wait for the drafts.
        share = min((len(self._steps) + 1) / self._stages.num_stages, 1.0)
        drafted = self._begin(rows, copies, share)
        step = _Step(executor=self, drafted=drafted, results=None)
        if rows:
            step = self._compute_first_stage(drafted, began)
        self._steps.append(step)
        self._completions.add(step.results)
        return step

    def _compute_first_stage(self, drafted: DraftedStep, began: int) -> _Step:
        rows, begun = drafted.rows, time.perf_counter_ns()
        _, ends = self._model.forward(rows, self._slots)
        ended = time.perf_counter_ns()
        pools = self._slot_options.pooled.spans(rows, ends)
        scored = self._slot_options.prompt_spans(rows, ends)
        tensors = self._slot_options.tensor_spans(rows, ends)
        drawn = _places_to_draw(rows, ends)
        firsts = [(span.first_hidden, span.stop - span.start) for span in scored]
        states, logits = (
            [(each.first_hidden, each.stop_hidden) for each in tensors if each.of_logits == wanted]
            for wanted in (False, True)
        )
        message = ReturnResults(
            pooled=[(pool.first_hidden, pool.stop_hidden) for pool in pools] + states,
            scored=[(first, first + count) for first, count in firsts] + logits,
            drawn=drawn.tobytes(),
        )
        with self._link.in_step():
            self._link.send(encode_step(message))
            took_us = no_times(self._stages)
            took_us[0] = (ended - begun) // 1000
            self._stages.send(took_us)
        idle_us = (began - self._step_ended_ns) // 1000
        self._step_ended_ns = ended
        return _Step(
            executor=self,
            drafted=drafted,
            results=StageResults(
                link=self._link,
                stages=self._stages,
                vocab_size=self._sampler.vocab_size,
                hidden_size=self._hidden_size,
                pools=pools,
                scored=scored,
                tensors=tensors,
                num_drawn=len(drawn),
            ),
            numbers=frozenset(row.slot.number for row in rows),
            idle_us=idle_us,
            begun_us=(begun - began) // 1000,
        )

    def finish(self, step: Submission) -> Drawn:
        """Return the output of the oldest step once it has come."""
        self._completions.take()
        oldest = self._steps.popleft()
        assert oldest is step
        drawn = Drawn(tokens=_NO_TOKENS)
        began = time.perf_counter_ns()
        try:
            if oldest.results is not None:
                drawn = self._draw_results(oldest, oldest.results)
                self._learn(oldest, oldest.results.took_us, drawn, time.perf_counter_ns() - began)
        finally:
            for number in oldest.closing:
                super().close(number)
        return drawn

    def _draw_results(self, step: _Step, results: StageResults) -> Drawn:
        pooled = self._pool(results.pools, results.states)
        prompts = list(map(prompt_piece, results.scored, results.scores))
        drafts = step.drafted.drafts
        rows = [
            _before(row, drafts.get(i)) for i, row in enumerate(step.drafted.rows) if row.samples
        ]
        if drafts:
            firsts = np.cumsum([0, *(row.drafts + 1 for row in rows)])
            drawn = self._verify(rows, firsts, functools.partial(self._sample_at, results.logits))
        elif rows:
            drawn = self._sample(results.logits, rows, [])
        else:
            drawn = Drawn(tokens=_NO_TOKENS)
        drawn.prompts, drawn.pooled = prompts, pooled
        drawn.tensors += results.pieces
        return drawn

    def _sample_at(self, logits: Floats, rows: list[Row], places: npt.NDArray[np.integer]) -> Drawn:
        chosen = logits if len(places) == len(logits) else logits[places]
        return self._sample(chosen, rows, [])

    def _learn(
        self, step: _Step, took_us: npt.NDArray[np.int64], drawn: Drawn, drawing_ns: int
    ) -> None:
        """Note the times of a step: those of its stages, and of drawing its tokens here."""
        self._note_times(took_us)
        self._step_ended_ns += drawing_ns  # it wasn't idle meanwhile
        own_us = int(took_us[0]) + drawing_ns // 1000
        slowest_us = int(with_head(took_us).max())
        step_us = max(slowest_us, step.begun_us + own_us)
        drawn.times = DeviceTimes(step_us=step_us, idle_us=step.idle_us)
        if self.drafter is not None:
            seconds = max(slowest_us, own_us) / 1e6 + (step.drafted.search_seconds or 0.0)
            self.drafter.learn(step.drafted, drawn, seconds)


def _places_to_draw(rows: Sequence[Row], ends: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return the hidden states whose logits are wanted: those of ends of rows, and of drafts."""
    places = [
        end + depth
        for row, end in zip(rows, ends.tolist(), strict=True)
        if row.samples
        for depth in range(row.drafts + 1)
    ]
    return np.array(places, dtype=np.int64)


def _before(row: Row, draft: Draft | None) -> Row:
    """Return ``row`` with its slot as it was submitted, before there was a place for its token.

    The first of its drafts was overwritten then, so they get a copy of the tokens.
    """
    slot = attrs.evolve(row.slot, length=row.end)
    if draft is not None:
        tokens = np.append(slot.tokens, np.array(draft.tokens, dtype=np.int32))
        slot = attrs.evolve(slot, buffer=tokens)
    return msgspec.structs.replace(row, slot=slot)
