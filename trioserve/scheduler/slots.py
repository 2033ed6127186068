"""The worker's slots, one for each sequence that it knows.

A slot is closed in the first plan built after its sequence left. It can be opened for another
sequence once every plan that named the first one has been acknowledged. That may be the very plan
that closes it: a worker closes before it opens. The slot's generation, which grows with every
opening, tells the two sequences apart.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False, repr=False)
class SlotAllocator:
    """Bookkeeping of ``num_slots`` slots with numbers from 0 on."""

    num_slots: int
    _generations: list[int] = attrs.field(init=False)
    _free: list[int] = attrs.field(init=False)
    _retiring: dict[int, int] = attrs.field(init=False, factory=dict)
    """Last plan that named a slot, by slot."""
    _unclosed: list[int] = attrs.field(init=False, factory=list)
    """Slots that were left and that no plan has closed yet."""
    _acknowledged: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._generations = [0] * self.num_slots
        self._free = list(range(self.num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of slots that :meth:`open` can give at once."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Number of slots that become free with results still in flight."""
        return len(self._retiring)

    @property
    def num_unclosed(self) -> int:
        """Number of slots that the next plan is to close."""
        return len(self._unclosed)

    def open(self) -> tuple[int, int]:
        """Take a free slot; return it and its new generation. There must be one."""
        slot = self._free.pop()
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def close(self, slot: int, epoch: int) -> None:
        """Note that the sequence in ``slot``, last named by plan ``epoch``, has left it."""
        self._unclosed.append(slot)
        if epoch <= self._acknowledged:
            self._free.append(slot)
        else:
            self._retiring[slot] = epoch

    def acknowledge(self, epoch: int) -> None:
        """Note that plans up to ``epoch`` are done."""
        self._acknowledged = epoch
        for slot in [slot for slot, last in self._retiring.items() if last <= epoch]:
            del self._retiring[slot]
            self._free.append(slot)

    def take_unclosed(self) -> list[int]:
        """Return and clear the slots that the plan being built is to close."""
        unclosed, self._unclosed = self._unclosed, []
        return unclosed
