"""Detection of a hung worker, by the deadlines of the :mod:`~trioserve.scheduler.watchdog`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import attrs
import trio

from trioserve.protocol.errors import WorkerLost
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.watchdog import Watchdog

SECOND_LOOK = 1.0
"""Seconds to receive a step that came while this process itself was stopped."""


@attrs.define(eq=False)
class HangDetection:
    """The task that ends a worker's life when the worker counts as hung.

    Args:
        watchdog: The deadlines.
        core: Returns the scheduler's state machine.
    """

    _watchdog: Watchdog
    _core: Callable[[], SchedulerCore]
    reason: str = attrs.field(init=False, default="")
    """Reason why the worker counts as hung; empty if it doesn't."""
    _overdue: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    """Cancelled when the worker counts as hung."""

    async def watch(self) -> None:
        """Block until the worker counts as hung, then raise :exc:`WorkerLost`."""
        while not self.reason:
            with trio.CancelScope(deadline=self._watchdog.deadline) as self._overdue:
                await trio.sleep_forever()
            if self.reason or self._watchdog.extend_deadlines(trio.current_time()):
                continue
            # If this process itself was stopped, read first what the worker sent meanwhile.
            await trio.sleep(SECOND_LOOK)
            if not self.reason and trio.current_time() >= self._watchdog.deadline:
                self.reason = self._watchdog.reason()
        raise WorkerLost(self.reason, reason="hung")

    def declare_hung(self, reason: str) -> None:
        """Treat the worker as hung."""
        self.reason = reason
        self._overdue.cancel()

    def follow(self) -> None:
        """Move the deadline to the oldest plan in flight."""
        in_flight = self._core().in_flight
        self._watchdog.follow(in_flight[0] if in_flight else None, trio.current_time())
        self._overdue.deadline = self._watchdog.deadline

    @contextlib.contextmanager
    def expect_reply(self, name: str, num_bytes: int) -> Iterator[None]:
        """Watch a call sent before the next plan until the block ends."""
        before_plan = self._core().next_number
        reply = self._watchdog.expect(name, num_bytes, before_plan, trio.current_time())
        self._overdue.deadline = self._watchdog.deadline
        try:
            yield
        finally:
            self._watchdog.settle(reply, trio.current_time())
            self._overdue.deadline = self._watchdog.deadline
