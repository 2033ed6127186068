"""Rare request options of open slots: adjusted logits, reports of given tokens, pooling, tensors.

Every step checks its rows for them, so the slots with an option are kept in sets. An empty set
makes the check free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.sampling.adjustments import Adjuster, Adjustment, Logits
from gpu.sampling.output_tensors import TensorSpan, spans_of
from gpu.sampling.pooled import PooledSlots
from gpu.sampling.prompt_logprobs import PromptSpan
from gpu.slots import UNKNOWN_TOKEN, Row, Slot


class SlotOptions:
    """The slots with rare request options, and the ``adjuster`` of their logits."""

    def __init__(self, adjuster: Adjuster) -> None:
        self._adjuster = adjuster
        self._adjusted: set[int] = set()
        self._naming: set[int] = set()  # with logprob_token_ids
        self._prompts: set[int] = set()  # with prompt_logprobs
        self._states: set[int] = set()  # with hidden states or logits of the prompt
        self._keeping: set[int] = set()  # with logits of each token
        self.pooled = PooledSlots()
        """The slots that request a pooled vector of their prompt."""

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        self._forget(slot.number)
        self.pooled.open(slot)
        self._adjuster.open(slot)
        if self._adjuster.adjusts(slot):
            self._adjusted.add(slot.number)
        if slot.sampler.logprob_token_ids and slot.sampler.logprobs >= 0:
            self._naming.add(slot.number)
        if slot.prompt_logprobs_from >= 0:
            self._prompts.add(slot.number)
        if slot.states_from >= 0 or slot.context_logits_from >= 0:
            self._states.add(slot.number)
        if slot.sampler.generation_logits:
            self._keeping.add(slot.number)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""
        self._forget(number)
        self.pooled.close(number)
        self._adjuster.close(number)

    def adjusts(self, rows: Sequence[Row]) -> bool:
        """Return whether the logits of any of ``rows`` are adjusted."""
        return bool(self._adjusted) and any(row.slot.number in self._adjusted for row in rows)

    def adjusts_slot(self, number: int) -> bool:
        """Return whether the logits of an open slot are adjusted."""
        return number in self._adjusted

    def needs_unknown_token(self, rows: Sequence[Row]) -> bool:
        """Return whether the adjustment of any of ``rows`` needs a token that isn't known yet."""
        return bool(self._adjusted) and any(
            row.slot.number in self._adjusted
            and row.slot.tokens[-1] == UNKNOWN_TOKEN
            and self._adjuster.needs_last_token(row.slot)
            for row in rows
        )

    def adjustment(self, logits: Logits, rows: Sequence[Row]) -> Adjustment:
        """Return the adjustment of ``logits`` [S, V] of ``rows``, whose needed tokens are known."""
        return self._adjuster.adjustment(logits, [row.slot for row in rows])

    def named_ids(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Return the ``logprob_token_ids`` of rows that have any, by index in ``rows``."""
        if not self._naming:
            return {}
        return {
            i: row.slot.sampler.logprob_token_ids
            for i, row in enumerate(rows)
            if row.slot.number in self._naming
        }

    def prompt_spans(
        self, rows: Sequence[Row], last_hidden: npt.NDArray[np.integer]
    ) -> list[PromptSpan]:
        """Return the prompt tokens whose log-probabilities ``rows`` give.

        ``last_hidden[i]`` is the index of row i's last hidden state in the step.
        """
        spans: list[PromptSpan] = []
        if not self._prompts:
            return spans
        for row, last in zip(rows, last_hidden, strict=True):
            slot = row.slot
            start = max(row.start + 1, slot.prompt_logprobs_from)
            stop = min(row.end + 1, slot.prompt_length)
            if slot.number in self._prompts and start < stop:
                hidden = int(last) + start - row.end
                spans.append(PromptSpan(slot=slot, start=start, stop=stop, first_hidden=hidden))
        return spans

    def tensor_spans(
        self, rows: Sequence[Row], last_hidden: npt.NDArray[np.integer]
    ) -> list[TensorSpan]:
        """Return the hidden states that ``rows`` give, and then the logits of prompts.

        ``last_hidden[i]`` is the index of row i's last hidden state in the step.
        """
        if not self._states:
            return []
        spans = [
            span
            for row, last in zip(rows, last_hidden, strict=True)
            if row.slot.number in self._states
            for span in spans_of(row, int(last))
        ]
        return sorted(spans, key=lambda span: span.of_logits)

    def kept_logits(self, rows: Sequence[Row]) -> list[int]:
        """Return the indices of ``rows`` whose logits are returned."""
        if not self._keeping:
            return []
        return [i for i, row in enumerate(rows) if row.slot.number in self._keeping]

    def _forget(self, number: int) -> None:
        for numbers in (
            *(self._adjusted, self._naming, self._prompts),
            *(self._states, self._keeping),
        ):
            numbers.discard(number)
