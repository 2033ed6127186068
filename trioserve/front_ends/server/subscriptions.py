"""Pictures for those who watch through a front end: they are taken in the engine process."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import attrs

from trioserve.observability.live import Monitor, Snapshot, SnapshotSubscription
from trioserve.observability.live.schema import TaskNode
from trioserve.protocol.errors import EngineError


@attrs.define(eq=False)
class FrontEndSubscriptions:
    """Who watches through one front end.

    Args:
        subject: what pictures are taken of.
        look_around: asks all front ends how they are; what their tasks are.
    """

    _monitor: Monitor
    _look_around: Callable[[], Awaitable[Sequence[TaskNode]]]
    _watchers: dict[int, tuple[SnapshotSubscription, contextlib.ExitStack]] = attrs.field(
        init=False, factory=dict
    )
    """By the front end's own numbers."""

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
            raise EngineError("nobody of that number watches")
        watcher, _ = self._watchers[number]
        return watcher.take(processes)

    def leave(self, number: int) -> None:
        """Whoever has that number watches no more, if it did."""
        if number in self._watchers:
            _, scope = self._watchers.pop(number)
            scope.close()

    def leave_all(self) -> None:
        """The front end is gone."""
        for number in list(self._watchers):
            self.leave(number)
