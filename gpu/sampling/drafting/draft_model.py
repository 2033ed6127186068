"""A draft model: a small model that drafts tokens for a larger one, for the whole batch at once.

It has a KV cache with the pages of the larger model's, under the same numbers. So prefixes that
sequences share are shared here, too. Its keys and values are computed when drafts are asked for,
and may be behind: a page that the prefix cache knows may lack them. They are then computed from the
tokens, up to :data:`MAX_CAUGHT_UP` in a step, and a sequence has no drafts before it has all.

The keys and values of a draft that isn't accepted are overwritten by those of the token in its
place. Nothing here changes a result (:mod:`gpu.sampling.verification`), and nothing here computes:
that is what a :class:`DraftModel` does on its device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.drafting.sources import AskedDraft, Draft, DraftKind
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row, Slot, SlotTable

MAX_CAUGHT_UP = 256
"""Most tokens that are caught up with in a step, so that a long prompt holds up no other sequence.
"""


class DraftModel(Protocol):
    """A model that drafts its most probable tokens, with a KV cache of its own."""

    def open(self, slot: Slot) -> None:
        """Begin with a slot, before its first row; its number may have been used before."""

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages of the KV cache: [C, 2], source and destination."""

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """Compute ``rows``, at least one, and return up to ``most`` drafts behind each.

        All tokens of the rows are known. A row that doesn't sample has no drafts, the others one or
        more. All drafts of a row but the last are computed. A draft that is no token is negative,
        and what follows it says nothing.
        """
        ...


def draft_row(row: Row, depth: int) -> Row:
    """Return the row that computes the draft number ``depth``, from 1 on, behind ``row``."""
    return Row(slot=row.slot, start=row.end + depth - 1, count=1, samples=True)


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
    begun: bool = False
    """True once the model knows the slot."""


class DraftModelSource:
    """:class:`gpu.sampling.drafting.sources.BatchSource` of a model and the slots of another.

    Args:
        model: The draft model, with a cache of as many pages as that of the other model.
        slots: Open slots of the other model.
        vocab_size: Number of tokens that both models have. A draft is one of these, and a sequence
            with another token has no drafts.
        page_size: Tokens of a page.
        num_pages: Pages of the cache, those in the host's memory included.
        max_tokens: Most tokens that the draft model computes at once.
        step_times: Times of the draft model's steps.
    """

    def __init__(
        self,
        model: DraftModel,
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
        self._opening: dict[int, Slot] = {}
        """Slots opened by this step, whose pages may be copied by it."""

    def open(self, slot: Slot) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        self._opening[slot.number] = slot

    def close(self, number: int) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        self._open.pop(number, None)
        self._opening.pop(number, None)

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        self._model.copy_pages(copies)
        for source, destination in copies.tolist():
            self._is_ready[destination] = self._is_ready[source]

    def forget_pages(self, numbers: Sequence[int]) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        self._is_ready[list(numbers)] = False

    def seconds(self, num_rows: int) -> float:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        return self._step_times.seconds(num_rows)

    def note_pages(self, rows: Sequence[Row]) -> None:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        for slot in self._opening.values():
            self._begin(slot)
        self._opening.clear()
        for row in rows:
            opened = self._open.get(row.slot.number)
            if opened is not None and opened.num_pages < row.slot.num_pages:
                self._is_ready[self._pages(row.slot)[opened.num_pages :]] = False
                opened.num_pages = row.slot.num_pages

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        """See :class:`~gpu.sampling.drafting.sources.BatchSource`."""
        rows = self._rows_behind(asked)
        if not rows:
            return {}
        most = [asked[i].most if row.samples else 0 for i, row in rows.items()]
        drafted = self._model.draft(list(rows.values()), most)
        found: dict[int, Draft] = {}
        for (i, row), tokens in zip(rows.items(), drafted, strict=True):
            self._note_ready(row)
            known = list(itertools.takewhile(self._knows, tokens))
            if known:
                self._open[row.slot.number].drafted = known
                found[i] = Draft(known, 1, DraftKind.MODEL)
        return found

    def _begin(self, slot: Slot) -> None:
        pages, num_shared = self._pages(slot), slot.computed // self._page_size
        self._is_ready[pages[num_shared:]] = False
        missing = np.flatnonzero(~self._is_ready[pages[:num_shared]])
        num_ready = int(missing[0]) if len(missing) else num_shared
        self._open[slot.number] = _OpenSlot(slot, num_ready * self._page_size, slot.num_pages)

    def _rows_behind(self, asked: Mapping[int, AskedDraft]) -> dict[int, Row]:
        """Return the rows of tokens that are new; those that sample have all."""
        rows: dict[int, Row] = {}
        room = self._room
        for i, each in asked.items():
            slot, opened = each.slot, self._open[each.slot.number]
            self._keep_accepted(opened)
            start = opened.num_ready
            missing = slot.num_tokens - start
            count = min(missing, room)
            if count and int(slot.tokens[start:].max()) < self._vocab_size:
                room -= count
                rows[i] = Row(slot=slot, start=start, count=count, samples=count == missing)
                if not opened.begun:
                    self._model.open(slot)
                    opened.begun = True
        return rows

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

    def _knows(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _pages(self, slot: Slot) -> npt.NDArray[np.int32]:
        pages: npt.NDArray[np.int32] = self._slots.block_tables[slot.number, : slot.num_pages]
        return pages
