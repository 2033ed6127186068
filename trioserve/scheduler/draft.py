"""A plan in the making, and what is remembered of it while it is in flight."""

from __future__ import annotations

import attrs

from trioserve import wire
from trioserve.scheduler.computation import Computation

__all__ = ["Draft", "InFlight", "Row"]

Row = tuple[Computation, int, bool]
"""Who computes, how many tokens, and whether one is sampled after them."""


@attrs.frozen(eq=False)
class InFlight:
    """What a plan that was sent asked for. ``slots`` and ``generations`` are its rows' columns."""

    number: int
    rows: list[Row]
    slots: bytes
    generations: bytes


@attrs.define(eq=False)
class Draft:
    """Collects the changes and rows of plan ``number``; ``budget`` is the tokens that are left."""

    number: int
    budget: int
    _opened: list[wire.OpenSlot] = attrs.field(init=False, factory=list)
    _page_slots: list[int] = attrs.field(init=False, factory=list)
    _page_ids: list[int] = attrs.field(init=False, factory=list)
    _singles: list[Row] = attrs.field(init=False, factory=list)
    _chunks: list[Row] = attrs.field(init=False, factory=list)

    def open(self, computation: Computation) -> None:
        """The worker is to open the slot that ``computation`` has got."""
        sequence = computation.sequence
        self._opened.append(
            wire.OpenSlot(
                slot=computation.slot,
                generation=computation.generation,
                tokens=wire.from_ints(computation.known_tokens()),
                prompt_length=len(sequence.request.prompt_ids),
                computed=computation.computed,
                pages=wire.from_ints(computation.pages),
                sampler=sequence.sampler,
            )
        )

    def append_page(self, computation: Computation, page: int) -> None:
        """The worker is to append ``page`` to the block table."""
        self._page_slots.append(computation.slot)
        self._page_ids.append(page)

    def add_row(self, computation: Computation, count: int, samples: bool) -> None:
        """``computation`` computes ``count`` tokens, and then samples one if ``samples``."""
        (self._singles if count == 1 else self._chunks).append((computation, count, samples))
        self.budget -= count

    def seal(self, closed: list[int]) -> tuple[wire.Plan, InFlight] | None:
        """The finished plan, rows of one token first; None where there is nothing to be done."""
        rows = self._singles + self._chunks
        if not rows and not closed:
            return None
        slots = wire.from_ints([computation.slot for computation, _, _ in rows])
        plan = wire.Plan(
            number=self.number,
            closed=wire.from_ints(closed),
            opened=self._opened,
            page_slots=wire.from_ints(self._page_slots),
            page_ids=wire.from_ints(self._page_ids),
            row_slots=slots,
            row_counts=wire.from_ints([count for _, count, _ in rows]),
        )
        generations = wire.from_ints([computation.generation for computation, _, _ in rows])
        return plan, InFlight(self.number, rows, slots, generations)
