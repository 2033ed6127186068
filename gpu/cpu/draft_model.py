"""A draft model on the CPU, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.cpu.model import CpuModel
from gpu.executor import Copies
from gpu.sampling.drafting.draft_model import draft_row
from gpu.slots import Row, Slot, SlotTable


class CpuDraftModel:
    """:class:`gpu.sampling.drafting.draft_model.DraftModel` over ``model``."""

    def __init__(self, model: CpuModel, slots: SlotTable) -> None:
        self._model = model
        self._slots = slots

    def open(self, slot: Slot) -> None:
        """Do nothing: a step reads the tokens of its slots."""

    def copy_pages(self, copies: Copies) -> None:
        """See :class:`~gpu.sampling.drafting.draft_model.DraftModel`."""
        self._model.copy_pages(copies)

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """See :class:`~gpu.sampling.drafting.draft_model.DraftModel`."""
        first = self._next_tokens(rows)
        drafts = [[token] if count else [] for token, count in zip(first, most, strict=True)]
        depth = 1
        while growing := [
            i for i, drafted in enumerate(drafts) if depth < most[i] and drafted[-1] >= 0
        ]:
            for i in growing:
                rows[i].slot.draft(drafts[i])
            following = self._next_tokens([draft_row(rows[i], depth) for i in growing])
            for i, token in zip(growing, following, strict=True):
                drafts[i].append(token)
            depth += 1
        return drafts

    def _next_tokens(self, rows: Sequence[Row]) -> list[int]:
        """Compute ``rows``; return the most probable next token of each, -1 if it has none."""
        hidden, ends = self._model.forward(rows, self._slots)
        best = self._model.most_probable(hidden, ends)
        if best is None:
            best = self._model.logits(hidden, ends).argmax(axis=1).astype(np.int32)
        tokens: list[int] = best.tolist()
        return tokens
