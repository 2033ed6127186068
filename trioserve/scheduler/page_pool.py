"""The pool of KV pages: the number of holders of each page, and the pages to hand out.

A page is in exactly one of four states:

======== ==========================================================================================
free     its content means nothing; it may be allocated
held     by one sequence, or by several as a shared prefix
retiring no sequence holds it, but a plan in flight may still touch it
idle     no sequence holds it; the prefix cache *keeps* it for its content
======== ==========================================================================================

::

    free ──allocate──▶ held ──release──▶ retiring ──acknowledge──▶ free, or idle where it is kept
                        ▲                   │                                  │
                        └────────share──────┴──────────────share───────────────┤
    free ◀─────────────────────────evict or offload────────────────────────────┘

If the host has memory for it, the content of an idle page can move there
(:mod:`~trioserve.scheduler.host_pages`): *offloading* frees the page, and *loading* brings the
content back onto any page. This module only keeps track of places; the worker copies.

An *epoch* is the number of a plan. A page is released with the epoch of the last plan that named
its holder, and can't be allocated until that plan has been acknowledged. A kept page may be shared
again at any time: it is full, and no plan in flight writes to a full page.

Idle pages are evicted by their *level* (:mod:`~trioserve.scheduler.page_priorities`), and within a
level by the time when they became idle. A path of the prefix tree is released deepest page first,
so a child always goes before a parent on the same level.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import attrs

from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.eviction import IdlePages
from trioserve.scheduler.host_pages import HostPages


@attrs.define(eq=False, repr=False)
class PagePool:
    """Bookkeeping of ``num_pages`` pages with numbers from 0 on.

    The ``num_host_pages`` places in the host's memory have the numbers after them.
    """

    num_pages: int
    num_host_pages: int = 0
    host: HostPages = attrs.field(init=False)
    _holders: list[int] = attrs.field(init=False)
    _epochs: list[int] = attrs.field(init=False)
    _kept: set[int] = attrs.field(init=False)
    _free: list[int] = attrs.field(init=False)
    _retiring: dict[int, None] = attrs.field(init=False)
    _idle: IdlePages = attrs.field(init=False)
    _levels: list[int] = attrs.field(init=False)
    acknowledged: int = attrs.field(init=False)
    """Last plan that is done."""

    def __attrs_post_init__(self) -> None:
        self.host = HostPages(self.num_pages, self.num_host_pages)
        self._holders = [0] * self.num_pages
        self._epochs = [0] * self.num_pages
        self._kept = set()
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._retiring = {}
        self._idle = IdlePages()
        self._levels = [DEFAULT_PRIORITY] * (self.num_pages + self.num_host_pages)
        self.acknowledged = 0

    @property
    def num_free(self) -> int:
        """Number of pages that :meth:`allocate` can give at once."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of pages that :meth:`evict` and :meth:`offload` can free at once."""
        return len(self._idle)

    @property
    def num_retiring(self) -> int:
        """Number of pages that become free or idle with results still in flight."""
        return len(self._retiring)

    @property
    def num_held(self) -> int:
        """Number of pages that are held or retiring."""
        return self.num_pages - len(self._free) - len(self._idle)

    def holders(self, page: int) -> int:
        """Return the number of sequences that hold ``page``."""
        return self._holders[page]

    def held(self) -> set[int]:
        """Return the pages with a holder. The cost grows with the size of the pool."""
        return {page for page, number in enumerate(self._holders) if number}

    def kept(self) -> Set[int]:
        """Return the pages that the prefix cache keeps."""
        return self._kept

    def epoch(self, page: int) -> int:
        """Return the last plan that named a former holder of ``page``; 0 if there was none."""
        return self._epochs[page]

    def is_kept(self, page: int) -> bool:
        """Return True if the prefix cache keeps ``page``."""
        return page in self._kept

    def is_on_host(self, page: int) -> bool:
        """Return True if ``page`` is the number of a place in the host's memory."""
        return page >= self.num_pages

    def level(self, page: int) -> int:
        """Return the eviction level of a page or a place on the host."""
        return self._levels[page]

    def set_level(self, page: int, level: int) -> None:
        """Set the eviction level of ``page``. An idle or stored page counts as new on its level."""
        self._levels[page] = level
        (self.host if self.is_on_host(page) else self._idle).move(page, level)

    def count_idle(self, pages: Iterable[int]) -> int:
        """Return the number of idle pages in ``pages``; sharing them leaves fewer to evict."""
        return sum(page in self._idle for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free pages, each with one holder. There must be as many."""
        assert 0 <= count <= len(self._free), f"{count} pages needed, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._epochs[page] = 0
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of ``pages``, all of them kept."""
        for page in pages:
            assert page in self._kept, f"page {page} is shared but not kept"
            if self._holders[page] == 0:
                self._idle.discard(page)
                self._retiring.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Iterable[int], epoch: int) -> None:
        """Remove a holder, last named by plan ``epoch``, from each of ``pages``.

        Pages on one path of the prefix tree must be given deepest first.
        """
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released but not held"
            self._holders[page] -= 1
            self._epochs[page] = max(self._epochs[page], epoch)
            if self._holders[page] == 0:
                self._retiring[page] = None
                if self._epochs[page] <= self.acknowledged:
                    self._settle(page)

    def acknowledge(self, epoch: int) -> None:
        """Note that plans up to ``epoch`` are done, and settle the pages that waited for them."""
        self.acknowledged = epoch
        for page in [page for page in self._retiring if self._epochs[page] <= epoch]:
            self._settle(page)

    def keep(self, page: int) -> None:
        """Keep ``page``, which is held, for the prefix cache once no sequence holds it."""
        assert self._holders[page] > 0, f"page {page} is kept but not held"
        assert page not in self._kept, f"page {page} is kept twice"
        self._kept.add(page)

    def stop_keeping(self, page: int) -> None:
        """Stop keeping ``page``, which is held."""
        assert self._holders[page] > 0, f"page {page} is not held"
        self._kept.remove(page)

    def discard(self, page: int) -> None:
        """Stop keeping ``page``, in whatever state and place it is."""
        if self.is_on_host(page):
            self.host.free(page)
            return
        self._kept.remove(page)
        if self._holders[page] == 0 and page not in self._retiring:
            self._idle.discard(page)
            self._free.append(page)

    def next_idle(self) -> int:
        """Return the idle page to be evicted first: of the lowest level, the one idle longest.

        There must be one.
        """
        return self._idle.first()

    def offload(self, page: int) -> int:
        """Free idle ``page`` and move its content to a place on the host. One must be free.

        Returns:
            The place.
        """
        place = self.host.store(self._levels[page])
        self._move_level(page, place)
        self.discard(page)
        return place

    def load(self, place: int) -> int:
        """Move the content of ``place`` on the host to a page, with one holder. One must be free.

        Returns:
            The page.
        """
        [page] = self.allocate(1)
        self.replace(place, page)
        return page

    def replace(self, place: int, page: int) -> None:
        """Let ``page``, which is held and has the same content, replace ``place`` on the host."""
        self.keep(page)
        self._move_level(place, page)
        self.host.free(place)

    def _move_level(self, old: int, new: int) -> None:
        self._levels[new] = self._levels[old]
        self._levels[old] = DEFAULT_PRIORITY

    def _settle(self, page: int) -> None:
        del self._retiring[page]
        if page in self._kept:
            self._idle.add(page, self._levels[page])
        else:
            self._free.append(page)

    def check(self) -> None:
        """Assert that every page is in exactly one state that fits it."""
        places = [set(self._free), self.held(), set(self._retiring), set(self._idle)]
        assert len(self._free) == len(places[0]), "a page is free twice"
        assert sum(map(len, places)) == len(set().union(*places)) == self.num_pages
        assert self._kept >= places[3], "an idle page is not kept"
        assert not self._kept & places[0], "a free page is kept"
        assert all(self._epochs[page] > self.acknowledged for page in self._retiring)
        usual = {page for page, level in enumerate(self._levels) if level == DEFAULT_PRIORITY}
        assert places[0] <= usual, "a free page has a priority"
        self._idle.check(self._levels)
        self.host.check(self._levels)
        free_places = set(range(self.num_pages, len(self._levels))) - self.host.stored()
        assert free_places <= usual, "a free place on the host has a priority"
