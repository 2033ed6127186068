"""A draft model on a GPU: all drafts of a step are queued before the first of them is read.

Each draft is drawn on the device and read from there by the step that computes it, so the host
waits once, for all of them. The steps replay the graphs of decode steps, and so does the first one
where the tokens to catch up with are few: each is then a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec

from gpu.cuda.executor import CudaExecutor
from gpu.cuda.step import CudaSubmission
from gpu.executor import Copies
from gpu.sampling.drafting.draft_model import draft_row
from gpu.sampling.drawn import DeviceTimes
from gpu.slots import Row, Slot
from trioserve.protocol.sampling import SamplerParams

_GREEDY = SamplerParams(temperature=0.0)


class CudaDraftModel:
    """:class:`gpu.sampling.drafting.draft_model.DraftModel` over ``executor``.

    The executor's sampler appends what it draws. ``max_rows`` is the most rows of one token that it
    computes in a step.
    """

    def __init__(self, executor: CudaExecutor, max_rows: int) -> None:
        self._executor = executor
        self._max_rows = max_rows
        self._times: list[DeviceTimes] = []

    def open(self, slot: Slot) -> None:
        """See :class:`~gpu.sampling.drafting.draft_model.DraftModel`."""
        self._executor.open(_greedy(slot))

    def copy_pages(self, copies: Copies) -> None:
        """See :class:`~gpu.sampling.drafting.draft_model.DraftModel`."""
        self._executor.copy_pages(copies)

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """See :class:`~gpu.sampling.drafting.draft_model.DraftModel`."""
        rows = [msgspec.structs.replace(row, slot=_greedy(row.slot)) for row in rows]
        steps = [self._queue(self._cut(rows), from_host=rows)]
        for depth in range(1, max(most)):
            growing = [draft_row(rows[i], depth) for i, count in enumerate(most) if count > depth]
            steps.append(self._queue(growing))
        drafts: list[list[int]] = [[] for _ in rows]
        for depth, step in enumerate(steps):
            drawn = step.wait()
            self._times.append(drawn.times)
            drafted = (each for each, count in zip(drafts, most, strict=True) if count > depth)
            for tokens, token in zip(drafted, drawn.tokens.tolist(), strict=True):
                tokens.append(token)
        return drafts

    def take_times(self) -> list[DeviceTimes]:
        """Return the times of the steps since the last call."""
        times, self._times = self._times, []
        return times

    def _queue(self, rows: Sequence[Row], from_host: Sequence[Row] = ()) -> CudaSubmission:
        step = CudaSubmission(self._executor.begin(rows, from_host=from_host), self._executor.draw)
        step.sample()
        return step

    def _cut(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return ``rows``, in rows of one token if a step has room for so many."""
        if sum(row.count for row in rows) > self._max_rows:
            return rows
        return [
            Row(
                slot=row.slot,
                start=position,
                count=1,
                samples=row.samples and position == row.end - 1,
            )
            for row in rows
            for position in range(row.start, row.end)
        ]


def _greedy(slot: Slot) -> Slot:
    """Return ``slot`` with nothing that it asks of the other model."""
    return attrs.evolve(slot, sampler=_GREEDY, adapter=0, prompt_logprobs_from=-1, embeddings=())
