"""Places in the host's memory for pages of the prefix cache that don't fit on the device.

Places are numbered after the pages, so that one number says where content is, on the device or the
host. A place is free or *stored*. When all are taken, the next store evicts one: the lowest level
first, then the one stored longest, like idle pages (:mod:`~trioserve.scheduler.page_pool`). A place
that is about to be copied back is *pinned* meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.scheduler.eviction import IdlePages


@attrs.define(eq=False, repr=False)
class HostPages:
    """Bookkeeping of ``num_places`` places with numbers from ``first`` on."""

    first: int
    num_places: int
    _free: list[int] = attrs.field(init=False)
    _stored: IdlePages = attrs.field(init=False, factory=IdlePages)
    _pinned: set[int] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.first + self.num_places - 1, self.first - 1, -1))

    def __contains__(self, place: int) -> bool:
        """Return True if something is stored in ``place``."""
        return place in self._stored or place in self._pinned

    @property
    def num_free(self) -> int:
        """Number of free places."""
        return len(self._free)

    @property
    def num_stored(self) -> int:
        """Number of places in use."""
        return self.num_places - len(self._free)

    def next(self) -> int | None:
        """Return the place to be evicted next; None if no place may be."""
        return self._stored.first() if len(self._stored) else None

    def store(self, level: int) -> int:
        """Take a free place for content of ``level`` and return it."""
        place = self._free.pop()
        self._stored.add(place, level)
        return place

    def move(self, place: int, level: int) -> None:
        """Set the level of ``place``; its content counts as stored now."""
        self._stored.move(place, level)

    def pin(self, place: int) -> None:
        """Protect ``place`` from eviction until its content has been copied back."""
        self._stored.discard(place)
        self._pinned.add(place)

    def free(self, place: int) -> None:
        """Free ``place``."""
        assert place in self, f"place {place} holds nothing"
        self._pinned.discard(place)
        self._stored.discard(place)
        self._free.append(place)

    def stored(self) -> set[int]:
        """Return the places in use."""
        return set(self._stored) | self._pinned

    def check(self, levels: Sequence[int]) -> None:
        """Assert that each place is free or in use; ``levels`` are those of all numbers."""
        assert not self._pinned, "a place is pinned while nothing is copied back"
        free, stored = set(self._free), set(self._stored)
        assert len(free) == len(self._free), "a place is free twice"
        assert not free & stored, "a free place holds something"
        assert free | stored == set(range(self.first, self.first + self.num_places))
        self._stored.check(levels)
