"""A draft model: a small model that drafts tokens for a larger one, for the whole batch at once.

It has a KV cache with the pages of the larger model's, under the same numbers. So prefixes that
sequences share are shared here, too. Its keys and values are computed when drafts are asked for,
and may be behind: a page that the prefix cache knows may lack them. They are then computed from the
tokens, up to :data:`MAX_CAUGHT_UP` in a step, and a sequence has no drafts before it has all.

The keys and values of a draft that isn't accepted are overwritten by those of the token in its
place. Nothing here changes a result (:mod:`gpu.sampling.verification`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from gpu.cpu.model import CpuModel
from gpu.executor import Copies
from gpu.sampling.drafting.sources import AskedDraft, Draft, DraftKind
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row, Slot, SlotTable

MAX_CAUGHT_UP = 1024
"""Most tokens that are caught up with in a step, so that a long prompt holds up no other sequence.
"""


@attrs.define(eq=False)
class _OpenSlot:
    """An open slot, as far as the draft model has computed it."""

    slot: Slot
    num_ready: int
    """Number of its first tokens that have keys and values."""
    num_pages: int
    """Number of its pages that were looked at."""
    drafted: list[int] = attrs.field(factory=list)
    """Last drafts behind those tokens. All but the last of them have keys and values, too."""


class DraftModel:
    """:class:`gpu.sampling.drafting.sources.BatchSource` over a model and the slots of another.

    Args:
        model: The draft model, with a cache of as many pages as that of the other model.
        slots: Open slots of the other model.
        vocab_size: Its number of tokens; a draft is one of these.
        page_size: Tokens of a page.
        num_pages: Pages of the cache, those in the host's memory included.
        max_tokens: Most tokens that the draft model computes at once.
        step_times: Times of the draft model's steps.
    """

    def __init__(
        self,
        model: CpuModel,
        slots: SlotTable,
        *,
        vocab_size: int,
        page_size: int,
        num_pages: int,
        max_tokens: int,
        step_times: StepTimes,
    ) -> None:
        self._model = model
        self._slots = slots
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._room = min(max_tokens, MAX_CAUGHT_UP)
        self._step_times = step_times
        self._is_ready = np.zeros(num_pages, dtype=np.bool_)
        """[num_pages], True for a full page with the keys and values of its tokens."""
        self._open: dict[int, _OpenSlot] = {}

    def open(self, slot: Slot) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        pages, num_shared = self._pages(slot), slot.computed // self._page_size
        self._is_ready[pages[num_shared:]] = False
        missing = np.flatnonzero(~self._is_ready[pages[:num_shared]])
        num_ready = int(missing[0]) if len(missing) else num_shared
        self._open[slot.number] = _OpenSlot(slot, num_ready * self._page_size, slot.num_pages)

    def close(self, number: int) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        self._open.pop(number, None)

    def copy_pages(self, copies: Copies) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        self._model.copy_pages(copies)
        for source, destination in copies.tolist():
            self._is_ready[destination] = self._is_ready[source]

    def seconds(self, num_rows: int) -> float:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        return self._step_times.seconds(num_rows)

    def note_pages(self, rows: Sequence[Row]) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        for row in rows:
            opened = self._open.get(row.slot.number)
            if opened is not None and opened.num_pages < row.slot.num_pages:
                self._is_ready[self._pages(row.slot)[opened.num_pages :]] = False
                opened.num_pages = row.slot.num_pages

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        drafts = self._catch_up(asked)
        length = 1
        while growing := [i for i in drafts if len(drafts[i]) == length < asked[i].most]:
            rows = []
            for i in growing:
                slot = asked[i].slot
                slot.draft(drafts[i])
                place = slot.num_tokens + length - 1
                rows.append(Row(slot=slot, start=place, count=1, samples=True))
            for i, token in zip(growing, self._next_tokens(rows), strict=True):
                if token is not None:
                    drafts[i].append(token)
            length += 1
        for i, drafted in drafts.items():
            self._open[asked[i].slot.number].drafted = drafted
        return {i: Draft(drafted, 1, DraftKind.MODEL) for i, drafted in drafts.items()}

    def _catch_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, list[int]]:
        """Compute tokens that are new, and return a first draft where all are."""
        rows: list[Row] = []
        indices: list[int] = []
        room = self._room
        for i, each in asked.items():
            opened = self._open[each.slot.number]
            self._keep_accepted(opened)
            missing = each.slot.num_tokens - opened.num_ready
            count = min(missing, room)
            if count:
                room -= count
                start = opened.num_ready
                rows.append(Row(slot=each.slot, start=start, count=count, samples=count == missing))
                indices.append(i)
        if not rows:
            return {}
        tokens = self._next_tokens(rows)
        for row in rows:
            self._note_ready(row)
        return {
            i: [token]
            for i, row, token in zip(indices, rows, tokens, strict=True)
            if row.samples and token is not None
        }

    def _keep_accepted(self, opened: _OpenSlot) -> None:
        """Count the last drafts that have become tokens, and forget the others."""
        known = opened.slot.tokens[opened.num_ready :].tolist()
        for draft, token in zip(opened.drafted[:-1], known, strict=False):
            if draft != token:
                break
            opened.num_ready += 1
        opened.drafted = []

    def _note_ready(self, row: Row) -> None:
        opened = self._open[row.slot.number]
        opened.num_ready = row.end
        self._is_ready[self._pages(row.slot)[: row.end // self._page_size]] = True

    def _next_tokens(self, rows: Sequence[Row]) -> list[int | None]:
        """Compute ``rows``; return the most probable next token of each, None if it has none."""
        hidden, ends = self._model.forward(rows, self._slots)
        best = self._model.most_probable(hidden, ends)
        if best is None:
            best = self._model.logits(hidden, ends).argmax(axis=1).astype(np.int32)
        return [token if 0 <= token < self._vocab_size else None for token in best.tolist()]

    def _pages(self, slot: Slot) -> npt.NDArray[np.int32]:
        pages: npt.NDArray[np.int32] = self._slots.block_tables[slot.number, : slot.num_pages]
        return pages
