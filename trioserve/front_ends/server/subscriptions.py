"""Subscriptions through a front end: to snapshots, and to the prefix caches."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import attrs

from trioserve.engine.cache_feed import CacheChanges, CacheFeed, CacheReader
from trioserve.observability.live import Monitor, Snapshot, SnapshotSubscription
from trioserve.observability.live.schema import TaskNode
from trioserve.protocol.errors import EngineError


@attrs.define(eq=False)
class FrontEndSubscriptions:
    """The subscriptions of one front end.

    Args:
        monitor: the source of snapshots.
        look_around: asks all front ends for their tasks.
        caches: the prefix caches of all workers.
    """

    _monitor: Monitor
    _look_around: Callable[[], Awaitable[Sequence[TaskNode]]]
    _caches: CacheFeed
    _watchers: dict[int, tuple[SnapshotSubscription, contextlib.ExitStack]] = attrs.field(
        init=False, factory=dict
    )
    """The subscriptions by the front end's own numbers."""
    _readers: dict[int, tuple[CacheReader, contextlib.ExitStack]] = attrs.field(
        init=False, factory=dict
    )
    """The subscriptions to the caches by such numbers; none is that of another subscription."""

    async def watch(self, number: int, requests: int, nodes: int) -> None:
        """Open a subscription of that number."""
        self._check_new(number)
        with contextlib.ExitStack() as stack:
            watched = self._monitor.watched(requests=requests, nodes=nodes)
            watcher = stack.enter_context(watched)
            self._watchers[number] = (watcher, stack.pop_all())

    def _check_new(self, number: int) -> None:
        if number in self._watchers or number in self._readers:
            raise EngineError(f"there is a subscription of the number {number}")

    async def take_snapshot(self, number: int) -> Snapshot:
        """Return the next snapshot of the subscription of that number."""
        processes = await self._look_around()
        if number not in self._watchers:
            raise EngineError("there is no subscription of that number")
        watcher, _ = self._watchers[number]
        return watcher.take(processes)

    async def read_cache(self, number: int) -> None:
        """Open a subscription of that number to the prefix caches."""
        self._check_new(number)
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(self._caches.reader())
            self._readers[number] = (reader, stack.pop_all())

    async def take_changes(self, number: int) -> CacheChanges:
        """Return the next changes of the subscription of that number."""
        if number not in self._readers:
            raise EngineError("there is no subscription of that number")
        return await self._readers[number][0].take()

    def leave(self, number: int) -> None:
        """End the subscription of that number, if there is one."""
        for subscription in (self._watchers.pop(number, None), self._readers.pop(number, None)):
            if subscription is not None:
                subscription[1].close()

    def leave_all(self) -> None:
        """End all subscriptions, because the front end is gone."""
        for number in (*self._watchers, *self._readers):
            self.leave(number)
