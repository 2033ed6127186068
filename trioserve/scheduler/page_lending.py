"""Pages of the prefix cache that a worker writes to shared memory for a sibling.

They are held meanwhile: a page on the device is neither evicted nor used for other tokens, and a
place on the host is not freed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import attrs

from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import Node


@attrs.frozen(eq=False)
class Lent:
    """Pages that are held for a transfer."""

    pages: list[int]
    """Numbers of the pages to write, in the order of their tokens."""
    held: list[int]
    """Pages on the device, also those before, the deepest first."""
    locked: list[int]
    """Places on the host."""
    plan: int
    """Last plan that computes the pages, or copies them to where they are."""


@attrs.define(eq=False)
class Lending:
    """The pages that one worker lends, from its start or reset to its end."""

    _prefix: PrefixCache
    held: collections.Counter[int] = attrs.field(init=False, factory=collections.Counter)
    """Number of transfers that hold each page on the device."""
    _copied: dict[int, int] = attrs.field(init=False, factory=dict)
    """Plans in flight that copy something to a page, by the page."""

    def note_copies(self, plan: int, copies: Iterable[tuple[int, int]]) -> None:
        """Note the copies that ``plan`` begins with."""
        self._copied.update((page, plan) for _, page in copies)

    def acknowledge(self, plan: int) -> None:
        """Note that plan ``plan`` is done."""
        if self._copied:
            self._copied = {page: each for page, each in self._copied.items() if each > plan}

    def begin(self, nodes: Sequence[Node]) -> Lent:
        """Hold the first of ``nodes``, one below the other, whose content can be read now.

        A node that has left the tree can't, nor can one whose content the next plan copies to its
        place, nor a place on the host that another transfer reads.
        """
        pool, copied = self._prefix.pool, {place for _, place in self._prefix.copies}
        pages: list[int] = []
        locked: list[int] = []
        held: list[int] = []
        last: Node | None = None
        plan = 0
        for node in nodes:
            page = node.page
            if not self._prefix.has(node) or page in copied:
                break
            if pool.is_on_host(page):
                if pool.host.is_locked(page):
                    break
                locked.append(page)
            else:
                last = node
                # A sequence that has left may have brought what a plan in flight writes.
                plan = max(plan, pool.epoch(page))
            pages.append(page)
            plan = max(plan, node.plan, self._copied.get(page, 0))
        while last is not None and last.parent is not None:
            held.append(last.page)
            last = last.parent
        pool.share(held)
        self.held.update(held)
        for place in locked:
            pool.host.lock(place)
        return Lent(pages, held, locked, plan)

    def end(self, lent: Lent) -> None:
        """End the holding of pages."""
        pool = self._prefix.pool
        pool.release(lent.held, 0)
        self.held -= collections.Counter(lent.held)
        for place in lent.locked:
            pool.host.unlock(place)
