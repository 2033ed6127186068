"""The loop that sends plans to the attached worker, and other messages before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import trio

from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.scheduler.core import SchedulerCore
from trioserve.workers import Link

_log = get_logger("trioserve.scheduler")


@attrs.define(eq=False, kw_only=True)
class PlanSender:
    """The sender of one scheduler.

    Args:
        on_planned: Called with each plan, or when there is none to make.
        on_nothing_to_send: Called before the sender waits.
    """

    on_planned: Callable[[], None]
    on_nothing_to_send: Callable[[], None]
    _work: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when there may be something to send."""
    _outbox: deque[wire.Message] = attrs.field(init=False, factory=deque)
    """Messages that go out before the next plan."""
    is_stuck: bool = attrs.field(init=False, default=False)
    """True if sequences are left, but no plan is in flight and none is made, which is a bug."""

    def wake(self) -> None:
        """Wake the sender: there may be something to send."""
        self._work.set()

    def send_first(self, message: wire.Message) -> None:
        """Send ``message`` before the next plan."""
        self._outbox.append(message)
        self._work.set()

    @trio.lowlevel.enable_ki_protection
    async def run(self, link: Link, core: SchedulerCore) -> None:
        """Send messages and plans as soon as there are any, until the worker is lost."""
        while True:
            message: wire.Message | None
            if self._outbox:
                message = self._outbox.popleft()
            else:
                message = core.next_plan(trio.current_time())
                self.on_planned()
            if message is None:
                self._check_stuck(core)
                self.on_nothing_to_send()
                self._work = trio.Event()
                await self._work.wait()
                continue
            self.is_stuck = False
            try:
                await link.send(message)
            except WorkerLost:
                # The receiver notices too, once it has read all that the worker still sent.
                return

    def _check_stuck(self, core: SchedulerCore) -> None:
        """Log an error if there is nothing to send although there should be."""
        was_stuck = self.is_stuck
        self.is_stuck = (
            not core.in_flight
            and core.num_unfinished > 0
            and core.pause_gate.is_open
            and not core.residency.wants_change
            and not core.uncompiled
            and not core.memory.lending.held
            and not (core.memory.fetched is not None and core.memory.fetched.is_busy)
        )
        if self.is_stuck and not was_stuck:
            _log.error(
                "stuck: sequences are left, but no plan is made and none is in flight",
                running=len(core.running),
                waiting=core.num_waiting,
            )

    def on_worker_lost(self) -> None:
        """Drop the messages that the worker didn't get."""
        self._outbox.clear()
        self.is_stuck = False
