"""A copy of an engine's prefix caches in another process, kept from the feed of their changes."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence

import attrs

from trioserve.engine.cache_feed import CacheChanges
from trioserve.engine.routing.load_report import LoadReport
from trioserve.scheduler.cache_events import CacheEvent

DEVICE, HOST = 0, 1
"""Levels of a page: in the worker's memory, or in the host's."""


class FeedGap(Exception):
    """Changes are missing: the copy needs a new snapshot."""


@attrs.define(eq=False)
class CacheCopy:
    """The pages of all workers of an engine, by hash, as its feed tells them.

    While the first snapshot isn't complete, pages are missing, which costs only time.
    """

    complete: bool = attrs.field(init=False, default=False)
    """True once the snapshot is complete."""
    loads: dict[int, LoadReport] = attrs.field(init=False, factory=dict)
    """The newest report of each worker, by its number."""
    pages: dict[int, dict[int, int]] = attrs.field(init=False, factory=dict)
    """Levels of pages by worker and hash."""
    _number: int = attrs.field(init=False, default=0)
    """Number of the last event."""
    _batch: int = attrs.field(init=False, default=-1)
    """Number of the last batch. Before the first, every batch without a snapshot is a gap."""

    def apply(self, changes: CacheChanges) -> None:
        """Apply the next changes.

        Raises:
            FeedGap: Changes before these are missing.
        """
        if changes.snapshot:
            self.pages.clear()
            self._number = changes.number - len(changes.events)
        elif changes.batch != self._batch + 1:
            raise FeedGap(f"batch {changes.batch} came where {self._batch + 1} is due")
        self._batch = changes.batch
        for event in changes.events:
            self._number += 1
            if event.number != self._number:
                raise FeedGap(f"event {event.number} came where {self._number} is due")
            self._apply_event(event)
        if changes.number != self._number:
            raise FeedGap(f"the feed is at event {changes.number}, the copy at {self._number}")
        for pages in changes.pages:
            own = self.pages.setdefault(pages.worker, {})
            own.update(dict.fromkeys(array("Q", pages.device), DEVICE))
            own.update(dict.fromkeys(array("Q", pages.host), HOST))
        self.loads = {each.worker: each for each in changes.loads}
        for gone in self.pages.keys() - self.loads.keys():
            del self.pages[gone]
        self.complete = changes.complete

    def _apply_event(self, event: CacheEvent) -> None:
        own = self.pages.setdefault(event.worker, {})
        match event.kind:
            case "stored" | "moved":
                own[event.hash] = event.cache_level
            case "removed":
                own.pop(event.hash, None)
            case "cleared":
                own.clear()

    def num_cached(self, worker: int, hashes: Sequence[int]) -> tuple[int, int]:
        """Return how many first pages of a prompt are on a worker's device, and on its host behind.

        A page is cached only if all pages before it are, and a page on the device is before all
        pages on the host, so both ends are found by bisection.
        """
        own = self.pages.get(worker, {})
        device = bisect.bisect_left(hashes, True, key=lambda hash: own.get(hash) != DEVICE)
        cached = bisect.bisect_left(hashes, True, lo=device, key=lambda hash: hash not in own)
        return device, cached - device
