"""Places in the host's memory for pages of the prefix cache that don't fit on the device.

Places are numbered after the pages, so that one number says where content is, on the device or the
host. A place is free or *stored*. When all are taken, the next store evicts one: the lowest level
first, then the one stored longest, like idle pages (:mod:`~trioserve.scheduler.page_pool`). A place
that is about to be copied back is *pinned* meanwhile.

Content also moves between places and the disk (:mod:`~trioserve.scheduler.disk_pages`) or another
worker (:mod:`~trioserve.scheduler.siblings`), while steps go on. A place that is read meanwhile is
*locked*: it isn't evicted, and what frees it does so at the end. A place that is written meanwhile
is *reserved*.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.eviction import IdlePages


@attrs.define(eq=False, repr=False)
class HostPages:
    """Bookkeeping of ``num_places`` places with numbers from ``first`` on."""

    first: int
    num_places: int
    _free: list[int] = attrs.field(init=False)
    _stored: IdlePages = attrs.field(init=False, factory=IdlePages)
    _pinned: set[int] = attrs.field(init=False, factory=set)
    _locked: set[int] = attrs.field(init=False, factory=set)
    _left: set[int] = attrs.field(init=False, factory=set)
    """Locked places whose content isn't needed any more."""
    _reserved: set[int] = attrs.field(init=False, factory=set)

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
        """Number of places that hold content of the cache."""
        return self.num_places - len(self._free) - len(self._left) - len(self._reserved)

    def next(self) -> int | None:
        """Return the place to be evicted next; None if no place may be now.

        Only the first in order may be, because the content of others may depend on it.
        """
        first = self._stored.first() if len(self._stored) else None
        return None if first in self._locked else first

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
        """Free ``place``, or mark it to be freed if it is locked."""
        assert place in self, f"place {place} holds nothing"
        self._pinned.discard(place)
        self._stored.discard(place)
        if place in self._locked:
            self._left.add(place)
        else:
            self._free.append(place)

    def lock(self, place: int) -> None:
        """Let a transfer read ``place``, until :meth:`unlock`."""
        assert place in self, f"place {place} holds nothing"
        assert place not in self._locked, f"place {place} is locked twice"
        self._locked.add(place)

    def is_locked(self, place: int) -> bool:
        """Return True if a transfer reads ``place``."""
        return place in self._locked

    def unlock(self, place: int) -> None:
        """End a transfer from ``place``."""
        self._locked.remove(place)
        if place in self._left:
            self._left.remove(place)
            self._free.append(place)

    def reserve(self) -> int:
        """Take a free place for a transfer to write to, until :meth:`settle` or :meth:`cancel`."""
        place = self._free.pop()
        self._reserved.add(place)
        return place

    def settle(self, place: int) -> None:
        """Store reserved ``place``, which has been written, on the default level."""
        self._reserved.remove(place)
        self._stored.add(place, DEFAULT_PRIORITY)

    def cancel(self, place: int) -> None:
        """Free reserved ``place``."""
        self._reserved.remove(place)
        self._free.append(place)

    def stored(self) -> set[int]:
        """Return the places that hold content of the cache."""
        return set(self._stored) | self._pinned

    def check(self, levels: Sequence[int]) -> None:
        """Assert that each place is free or in use; ``levels`` are those of all numbers."""
        assert not self._pinned, "a place is pinned while nothing is copied back"
        free, stored = set(self._free), set(self._stored)
        assert len(free) == len(self._free), "a place is free twice"
        every = [free, stored, self._left, self._reserved]
        assert sum(map(len, every)) == len(set().union(*every)) == self.num_places, (
            "a place is in two states, or in none"
        )
        assert self._left <= self._locked <= stored | self._left, "a place without use is locked"
        self._stored.check(levels)
