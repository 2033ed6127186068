"""Subscriptions to snapshots through a front end: snapshots are taken in the engine process."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import attrs

from trioserve.observability.live import Monitor, Snapshot, SnapshotSubscription
from trioserve.observability.live.schema import TaskNode
from trioserve.protocol.errors import EngineError


@attrs.define(eq=False)
class FrontEndSubscriptions:
    """The subscriptions of one front end.

    Args:
        monitor: the source of snapshots.
        look_around: asks all front ends for their tasks.
    """

    _monitor: Monitor
    _look_around: Callable[[], Awaitable[Sequence[TaskNode]]]
    _watchers: dict[int, tuple[SnapshotSubscription, contextlib.ExitStack]] = attrs.field(
        init=False, factory=dict
    )
    """The subscriptions by the front end's own numbers."""

    async def watch(self, number: int, requests: int, nodes: int) -> None:
        """Open a subscription of that number."""
        with contextlib.ExitStack() as stack:
            watched = self._monitor.watched(requests=requests, nodes=nodes)
            watcher = stack.enter_context(watched)
            self._watchers[number] = (watcher, stack.pop_all())

    async def take_snapshot(self, number: int) -> Snapshot:
        """Return the next snapshot of the subscription of that number."""
        processes = await self._look_around()
        if number not in self._watchers:
            raise EngineError("there is no subscription of that number")
        watcher, _ = self._watchers[number]
        return watcher.take(processes)

    def leave(self, number: int) -> None:
        """End the subscription of that number, if there is one."""
        if number in self._watchers:
            _, scope = self._watchers.pop(number)
            scope.close()

    def leave_all(self) -> None:
        """End all subscriptions, because the front end is gone."""
        for number in list(self._watchers):
            self.leave(number)
