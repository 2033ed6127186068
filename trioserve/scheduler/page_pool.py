"""The pool of KV pages: how many sequences hold each page, and which pages may be handed out.

A page is in exactly one of four states:

======== ==========================================================================================
free     its content means nothing; it may be allocated
held     by one sequence, or by several as a shared prefix
retiring nobody holds it, but a plan in flight may still touch it
idle     nobody holds it; the prefix cache *keeps* it for its content
======== ==========================================================================================

::

    free ──allocate──▶ held ──release──▶ retiring ──acknowledge──▶ free, or idle where it is kept
                        ▲                   │                                  │
                        └────────share──────┴──────────────share───────────────┤
    free ◀─────────────────────────evict or offload────────────────────────────┘

What an idle page holds can also go on in the host's memory, where there is some for that
(:mod:`~trioserve.scheduler.host_pages`): it is *offloaded* there, which frees the page, and
*loaded* back onto any page. This module only says where things are; copying is the worker's.

An *epoch* is the number of a plan. A page is released with the epoch of the last plan that named
its holder, and is out of reach until that plan has been acknowledged. A kept page may be shared
again at any time: it is full, and no plan in flight writes to a full page.

Idle pages go by their *level* (:mod:`~trioserve.scheduler.page_priorities`), and within one by
when they came there. Whoever releases a path of the prefix tree names the deepest page first, so a
child always goes before a parent on the same level.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import attrs

from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.eviction import IdlePages
from trioserve.scheduler.host_pages import HostPages


@attrs.define(eq=False, repr=False)
class PagePool:
    """``num_pages`` pages, known by their numbers from 0. Pure bookkeeping.

    ``num_host_pages`` places in the host's memory have the numbers behind them.
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
    _acknowledged: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.host = HostPages(self.num_pages, self.num_host_pages)
        self._holders = [0] * self.num_pages
        self._epochs = [0] * self.num_pages
        self._kept = set()
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._retiring = {}
        self._idle = IdlePages()
        self._levels = [DEFAULT_PRIORITY] * (self.num_pages + self.num_host_pages)
        self._acknowledged = 0

    @property
    def num_free(self) -> int:
        """Pages that :meth:`allocate` can give at once."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that :meth:`evict` and :meth:`offload` can free at once."""
        return len(self._idle)

    @property
    def num_retiring(self) -> int:
        """Pages that come back with results that are still in flight."""
        return len(self._retiring)

    @property
    def num_held(self) -> int:
        """Pages that are neither free nor idle: those of sequences and those that retire."""
        return self.num_pages - len(self._free) - len(self._idle)

    def holders(self, page: int) -> int:
        """How many sequences hold ``page``."""
        return self._holders[page]

    def held(self) -> set[int]:
        """The pages that somebody holds. Takes as long as the pool is large."""
        return {page for page, number in enumerate(self._holders) if number}

    def kept(self) -> Set[int]:
        """The pages that the prefix cache keeps."""
        return self._kept

    def epoch(self, page: int) -> int:
        """The last plan that named a former holder of ``page``; 0 if it has had none."""
        return self._epochs[page]

    def is_kept(self, page: int) -> bool:
        """Whether the prefix cache keeps ``page``."""
        return page in self._kept

    def is_on_host(self, page: int) -> bool:
        """Whether ``page`` is the number of a place in the host's memory."""
        return page >= self.num_pages

    def level(self, page: int) -> int:
        """How much what ``page`` holds is worth keeping; also of a place on the host."""
        return self._levels[page]

    def set_level(self, page: int, level: int) -> None:
        """How much ``page`` is worth keeping. If it is idle or on the host, it is from now on."""
        self._levels[page] = level
        (self.host if self.is_on_host(page) else self._idle).move(page, level)

    def count_idle(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` are idle: sharing them takes as many from what can be evicted."""
        return sum(page in self._idle for page in pages)

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, each with one holder. There must be as many."""
        assert 0 <= count <= len(self._free), f"{count} pages asked of {len(self._free)} free ones"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._epochs[page] = 0
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Give each of ``pages``, all of them kept, one holder more."""
        for page in pages:
            assert page in self._kept, f"page {page} is shared but not kept"
            if self._holders[page] == 0:
                self._idle.discard(page)
                self._retiring.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Iterable[int], epoch: int) -> None:
        """Take one holder, which plan ``epoch`` was the last to name, from each of ``pages``.

        Of pages on one path of the prefix tree, the deepest comes first.
        """
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released but not held"
            self._holders[page] -= 1
            self._epochs[page] = max(self._epochs[page], epoch)
            if self._holders[page] == 0:
                self._retiring[page] = None
                if self._epochs[page] <= self._acknowledged:
                    self._settle(page)

    def acknowledge(self, epoch: int) -> None:
        """Plans up to ``epoch`` are done: what they alone kept out of reach comes back."""
        self._acknowledged = epoch
        for page in [page for page in self._retiring if self._epochs[page] <= epoch]:
            self._settle(page)

    def keep(self, page: int) -> None:
        """The prefix cache wants ``page``, which is held, to stay once nobody holds it."""
        assert self._holders[page] > 0, f"page {page} is kept but not held"
        assert page not in self._kept, f"page {page} is kept twice"
        self._kept.add(page)

    def unkeep(self, page: int) -> None:
        """The prefix cache wants ``page``, which is held, no more."""
        assert self._holders[page] > 0, f"page {page} is given up but not held"
        self._kept.remove(page)

    def give_up(self, page: int) -> None:
        """The prefix cache wants ``page`` no more, wherever it is and whoever has it."""
        if self.is_on_host(page):
            self.host.free(page)
            return
        self._kept.remove(page)
        if self._holders[page] == 0 and page not in self._retiring:
            self._idle.discard(page)
            self._free.append(page)

    def next_idle(self) -> int:
        """The idle page that is to go first: of the lowest level, the one longest there.

        There must be one.
        """
        return self._idle.first()

    def evict(self) -> int:
        """Free that page.

        Returns:
            which it was.
        """
        page = self.next_idle()
        self.give_up(page)
        return page

    def offload(self, page: int) -> int:
        """Free idle ``page``, what it holds going to the host, where a place must be free.

        Returns:
            the place.
        """
        place = self.host.store(self._levels[page])
        self._move_level(page, place)
        self.give_up(page)
        return place

    def load(self, place: int) -> int:
        """Give what ``place`` on the host holds a page, with one holder. One must be free.

        Returns:
            the page.
        """
        [page] = self.allocate(1)
        self.replace(place, page)
        return page

    def replace(self, place: int, page: int) -> None:
        """``page``, which is held, holds what ``place`` on the host did, and is kept for it."""
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
        """Assert that every page is in exactly one state, and that each state suits it."""
        places = [set(self._free), self.held(), set(self._retiring), set(self._idle)]
        assert len(self._free) == len(places[0]), "a page is free twice"
        assert sum(map(len, places)) == len(set().union(*places)) == self.num_pages
        assert self._kept >= places[3], "an idle page is not kept"
        assert not self._kept & places[0], "a free page is kept"
        assert all(self._epochs[page] > self._acknowledged for page in self._retiring)
        usual = {page for page, level in enumerate(self._levels) if level == DEFAULT_PRIORITY}
        assert places[0] <= usual, "a free page is worth something"
        self._idle.check(self._levels)
        self.host.check(self._levels)
        free_places = set(range(self.num_pages, len(self._levels))) - self.host.stored()
        assert free_places <= usual, "a free place on the host is worth something"
