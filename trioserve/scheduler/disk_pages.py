"""Pages of the prefix cache on disk: which there are, and which are to be written.

The worker keeps each page in a file, which it finds by the page's key
(:mod:`~trioserve.scheduler.page_keys`). Numbers of this process are no part of it, so files outlive
the worker and the server. Pages of an adapter aren't kept: another adapter may have its number
tomorrow.

A page that has moved to the host is written to its file, in a *transfer* beside the steps. Then it
is evicted from the host without a loss. :mod:`~trioserve.scheduler.fetched_pages` has the way back,
and :mod:`~trioserve.scheduler.page_transfers` the tasks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from trioserve.scheduler.fetched_pages import FetchPace, Found, Missing
from trioserve.scheduler.page_keys import key_of
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import Namespace, Node

MOST_WRITTEN = 16
"""Pages that a transfer writes at most; they can't be evicted from the host meanwhile."""
_PART_WRITTEN = 4
"""A transfer writes at most one in so many places of the host."""


@attrs.define(eq=False)
class DiskIndex:
    """The keys of the pages on disk, which outlive the pages in memory."""

    _folders: dict[str, set[bytes]] = attrs.field(factory=dict)
    """Keys by folder; workers of one host have one dict."""
    keys: set[bytes] = attrs.field(init=False, factory=set)
    """Keys of the pages in this worker's folder, which others may have, too."""
    pace: FetchPace = attrs.field(init=False, factory=FetchPace)
    due: Literal["", "delete_pages", "list_pages"] = attrs.field(init=False, default="")
    """Call that the worker is due after the cache was emptied; empty for none."""

    def empty(self, due: Literal["delete_pages", "list_pages"]) -> None:
        """Forget all pages, and have their files deleted, or those of other weights listed."""
        if due == "list_pages":
            self.keys = set()  # those of the old folder are other workers' still
        else:
            self.keys.clear()
        self.due = due

    def use(self, folder: str, keys: Iterable[bytes]) -> None:
        """Take the pages that are in ``folder`` for those of this worker."""
        self.keys = self._folders.setdefault(folder, set())
        self.keys.clear()
        self.keys.update(keys)

    def find(self, missing: Missing) -> Found | None:
        """See :meth:`trioserve.scheduler.fetched_pages.PageSource.find`."""
        if not self.keys or not _is_lasting(missing.namespace):
            return None
        there = list(itertools.takewhile(lambda each: each[0] in self.keys, missing.pages()))
        if not there:
            return None
        keys, tokens = zip(*there, strict=True)
        return Found(source=self, keys=keys, tokens=tokens)

    def forget(self, key: bytes) -> None:
        """See :meth:`trioserve.scheduler.fetched_pages.PageSource.forget`."""
        self.keys.discard(key)


@attrs.frozen(eq=False, kw_only=True)
class Write:
    """A transfer of pages from places on the host to the disk."""

    keys: Sequence[bytes]
    places: Sequence[int]
    num_flushes: int


@attrs.define(eq=False)
class DiskPages:
    """The pages on disk of one worker's prefix cache, from its start or reset to its end."""

    index: DiskIndex
    _prefix: PrefixCache
    _offloaded: list[Node] = attrs.field(init=False, factory=list)
    """Pages that the next plan copies to the host."""
    _copying: dict[int, tuple[Node, int]] = attrs.field(init=False, factory=dict)
    """Pages that plans in flight copy to the host, with the plans' numbers, by place. If a plan
    fails, they may not be there.
    """
    _unwritten: OrderedDict[int, Node] = attrs.field(init=False, factory=OrderedDict)
    """Pages that are on the host and not on disk, by their places."""

    def __attrs_post_init__(self) -> None:
        self._prefix.on_offloaded = self._offload

    @property
    def has_unwritten(self) -> bool:
        """True if pages have moved to the host and aren't on disk."""
        return bool(self._unwritten)

    def _offload(self, node: Node) -> None:
        self._offloaded.append(node)

    def note_plan(self, number: int) -> None:
        """Note that plan ``number`` has the copies of all pages offloaded since the one before."""
        for node in self._offloaded:
            if self._is_at(node, node.page):
                self._copying[node.page] = node, number
        self._offloaded.clear()

    def acknowledge(self, number: int) -> None:
        """Note that plan ``number`` is done, so that what it copied can be written."""
        done = [place for place, (_, plan) in self._copying.items() if plan <= number]
        for place in done:
            node, _ = self._copying.pop(place)
            if self._is_at(node, place):
                self._unwritten[place] = node

    def next_write(self) -> Write | None:
        """Begin to write pages, those first that have been on the host longest; None if all are."""
        host = self._prefix.pool.host
        most = min(MOST_WRITTEN, max(host.num_places // _PART_WRITTEN, 1))
        keys: dict[bytes, int] = {}
        while self._unwritten and len(keys) < most:
            place, node = self._unwritten.popitem(last=False)
            if not self._is_at(node, place) or not _is_lasting(node.root.namespace):
                continue
            key = key_of(node)
            if key not in self.index.keys:
                keys[key] = place
        for place in keys.values():
            host.lock(place)
        if not keys:
            return None
        places, num_flushes = list(keys.values()), self._prefix.num_flushes
        return Write(keys=list(keys), places=places, num_flushes=num_flushes)

    def end_write(self, write: Write, written: Sequence[bool], removed: Iterable[bytes]) -> None:
        """End a transfer: ``written`` says which pages are on disk now.

        ``removed`` are keys of pages that were deleted to make room for them.
        """
        for key, place, is_written in zip(write.keys, write.places, written, strict=True):
            self._prefix.pool.host.unlock(place)
            if is_written and write.num_flushes == self._prefix.num_flushes:
                self.index.keys.add(key)
        self.index.keys.difference_update(removed)

    def _is_at(self, node: Node, place: int) -> bool:
        """Return True if ``node`` is in the tree, with its content in ``place`` on the host."""
        is_on_host = self._prefix.pool.is_on_host(place)
        return is_on_host and node.page == place and self._prefix.has(node)


def _is_lasting(namespace: Namespace) -> bool:
    """Return True if the pages of a namespace are kept on disk: if it is that of a salt alone."""
    return len(namespace) == 1
