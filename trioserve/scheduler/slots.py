"""The worker's slots: one for each sequence that it knows.

A slot is closed in the first plan that is made after its sequence left, and opened for another
sequence once every plan that named the first one has been acknowledged (in the very plan that
closes it at the earliest: a worker closes before it opens). The generation, which grows with every
opening, tells the two apart.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False, repr=False)
class SlotAllocator:
    """``num_slots`` slots, known by their numbers from 0. Pure bookkeeping."""

    num_slots: int
    _generations: list[int] = attrs.field(init=False)
    _free: list[int] = attrs.field(init=False)
    _retiring: dict[int, int] = attrs.field(init=False, factory=dict)
    """Slot to epoch: the last plan that named it."""
    _unclosed: list[int] = attrs.field(init=False, factory=list)
    """Slots whose sequence has left, which no plan has told the worker yet."""
    _acknowledged: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._generations = [0] * self.num_slots
        self._free = list(range(self.num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that :meth:`open` can give at once."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Slots that come back with results that are still in flight."""
        return len(self._retiring)

    @property
    def num_unclosed(self) -> int:
        """Slots that the next plan is to close."""
        return len(self._unclosed)

    def open(self) -> tuple[int, int]:
        """A free slot and its new generation. There must be one."""
        slot = self._free.pop()
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def close(self, slot: int, epoch: int) -> None:
        """The sequence in ``slot``, which plan ``epoch`` was the last to name, has left it."""
        self._unclosed.append(slot)
        if epoch <= self._acknowledged:
            self._free.append(slot)
        else:
            self._retiring[slot] = epoch

    def acknowledge(self, epoch: int) -> None:
        """Plans up to ``epoch`` are done."""
        self._acknowledged = epoch
        for slot in [slot for slot, last in self._retiring.items() if last <= epoch]:
            del self._retiring[slot]
            self._free.append(slot)

    def take_unclosed(self) -> list[int]:
        """The slots that the plan in the making is to close; they are asked for once."""
        unclosed, self._unclosed = self._unclosed, []
        return unclosed
