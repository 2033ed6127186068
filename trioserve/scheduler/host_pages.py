"""Places in the host's memory, for pages of the prefix cache that the device has no room for.

A place has a number behind those of the pages, so that one number says where a page's content is,
on which side it may be. It is free or *stored* in, and who stores one more when all are taken gives
one away: by its level, and within that by how long it has been there, as idle pages are
(:mod:`~trioserve.scheduler.page_pool`). Those that are about to be copied back are *pinned*
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.scheduler.eviction import IdlePages


@attrs.define(eq=False, repr=False)
class HostPages:
    """``num_places`` places, known by their numbers from ``first`` on. Pure bookkeeping."""

    first: int
    num_places: int
    _free: list[int] = attrs.field(init=False)
    _stored: IdlePages = attrs.field(init=False, factory=IdlePages)
    _pinned: set[int] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.first + self.num_places - 1, self.first - 1, -1))

    def __contains__(self, place: int) -> bool:
        """Whether something is stored in ``place``."""
        return place in self._stored or place in self._pinned

    @property
    def num_free(self) -> int:
        """Places with nothing in them."""
        return len(self._free)

    @property
    def num_stored(self) -> int:
        """Places with something in them."""
        return self.num_places - len(self._free)

    def next(self) -> int | None:
        """The place that is to be given away next; None if there is none that may be."""
        return self._stored.first() if len(self._stored) else None

    def store(self, level: int) -> int:
        """A free place, which from now on has something in it that is worth ``level``."""
        place = self._free.pop()
        self._stored.add(place, level)
        return place

    def move(self, place: int, level: int) -> None:
        """What is in ``place`` is worth ``level``, and counts as stored now."""
        self._stored.move(place, level)

    def pin(self, place: int) -> None:
        """What is in ``place`` is about to be copied back: it isn't given away until then."""
        self._stored.discard(place)
        self._pinned.add(place)

    def free(self, place: int) -> None:
        """What is in ``place`` is of no use any more, or is elsewhere."""
        assert place in self, f"place {place} holds nothing"
        self._pinned.discard(place)
        self._stored.discard(place)
        self._free.append(place)

    def stored(self) -> set[int]:
        """The places with something in them."""
        return set(self._stored) | self._pinned

    def check(self, levels: Sequence[int]) -> None:
        """Assert that each place is free or stored in, by the ``levels`` of all numbers."""
        assert not self._pinned, "a place is pinned while nothing is copied back"
        free, stored = set(self._free), set(self._stored)
        assert len(free) == len(self._free), "a place is free twice"
        assert not free & stored, "a free place holds something"
        assert free | stored == set(range(self.first, self.first + self.num_places))
        self._stored.check(levels)
