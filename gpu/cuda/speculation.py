"""Speculative decoding on a GPU, one step after the other.

The next drafts depend on the tokens that were drawn, so each step is waited for before the next is
queued, with drafts or without. A row and its drafts are rows of one token
(:meth:`gpu.cuda.executor.CudaExecutor.begin`). They replay the graphs of steps without drafts, and
their results have the bits that they have there as far as those don't depend on the batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from gpu.cuda.draft_model import CudaDraftModel
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.step import CudaStep, CudaSubmission
from gpu.executor import NO_COPIES, Content, Copies, Finished, Submission
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drawn import DeviceTimes, Drawn
from gpu.sampling.verification import Verification
from gpu.slots import Row, Slot


class SpeculativeExecutor:
    """:class:`gpu.executor.Executor` that verifies drafts of ``drafter``.

    ``max_rows`` is the most rows of one token that ``executor`` computes in a step. The steps of
    ``draft_model``, which drafts for ``drafter``, count as a part of the step that they draft for.
    """

    def __init__(
        self,
        executor: CudaExecutor,
        drafter: Drafter,
        max_rows: int,
        draft_model: CudaDraftModel | None = None,
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._max_rows = max_rows
        self._draft_model = draft_model

    @property
    def completions(self) -> None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return None

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        self._executor.open(slot)
        self._drafter.open(slot)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""
        self._executor.close(number)
        self._drafter.close(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`."""
        began = time.perf_counter()
        if len(copies):
            self._drafter.copy_pages(copies)
        step = self._drafter.add_drafts(rows, self._max_rows - len(rows))
        compute = self._verify if step.drafts else self._compute
        drawn = compute(step.rows, copies)
        if self._draft_model is not None:
            drawn.times = _joined([*self._draft_model.take_times(), drawn.times])
        self._drafter.learn(step, drawn, time.perf_counter() - began)
        return Finished(drawn)

    def begin_transfer(self, written: Sequence[int]) -> None:
        """See :meth:`gpu.executor.PagedExecutor.begin_transfer`."""
        self._drafter.forget_pages(written)

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.executor.PagedExecutor.read_page`."""
        return self._executor.read_page(number)

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.executor.PagedExecutor.write_page`."""
        self._executor.write_page(number, content)

    def _verify(self, rows: Sequence[Row], copies: Copies) -> Drawn:
        """Compute rows of which some have drafts."""
        step = self._executor.begin(rows, copies)
        sampling = [row for row in rows if row.samples]
        stepwise = {i for i, row in enumerate(sampling) if self._executor.adjusts(row)}
        verification = Verification(sampling, stepwise)
        if not stepwise:
            parts = [self._draw(step)]
            verification.take(parts[0])
        else:
            parts = [self._draw(step.without_draws())]
        firsts = [0, *itertools.accumulate(row.drafts + 1 for row in sampling)]
        while verification.places:
            indices = [firsts[index] + depth for index, depth in verification.places]
            parts.append(self._executor.draw_some(step, indices).wait())
            verification.take(parts[-1])
        return _with_reports(verification.result(), parts)

    def _compute(self, rows: Sequence[Row], copies: Copies) -> Drawn:
        return self._executor.submit(rows, copies).wait()

    def _draw(self, step: CudaStep) -> Drawn:
        submission = CudaSubmission(step, self._executor.draw)
        submission.sample()
        return submission.wait()


def _with_reports(drawn: Drawn, parts: Sequence[Drawn]) -> Drawn:
    """Return ``drawn`` with what the parts of its step report besides tokens."""
    drawn.prompts, drawn.pooled = parts[0].prompts, parts[0].pooled
    drawn.tensors = [piece for part in parts for piece in part.tensors]
    drawn.times = _joined([part.times for part in parts])
    return drawn


def _joined(times: Sequence[DeviceTimes]) -> DeviceTimes:
    """Return the times of parts that follow each other, as those of one step."""
    return DeviceTimes(
        step_us=sum(each.step_us for each in times),
        gap_us=sum(each.gap_us for each in times) + sum(each.idle_us for each in times[1:]),
        idle_us=times[0].idle_us,
        launch_us=sum(each.launch_us for each in times),
    )
