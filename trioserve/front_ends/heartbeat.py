"""Heartbeats, which tell a hung front end from one with nothing to send.

A front end sends :class:`~trioserve.front_ends.messages.Alive` again and again from its event loop.
None comes from a process that is stopped, or has a blocked loop.
"""

from __future__ import annotations

import math

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.protocol.errors import FrontEndLost
from trioserve.scheduler.hang_detection import SECOND_LOOK
from trioserve.scheduler.watchdog import MAX_LATENESS

MIN_PATIENCE = 10.0
"""Least number of seconds, however small ``watchdog_timeout`` is. A front end that ends is silent
while its last spans leave, for up to
:data:`~trioserve.observability.tracing.FLUSH_SECONDS`."""
SIGNS = 4
"""Heartbeats that a front end sends within that time."""


def patience_of(config: EngineConfig) -> float:
    """Return the seconds after which a silent front end counts as hung; infinity for never."""
    return max(config.watchdog_timeout, MIN_PATIENCE) if config.watchdog_timeout else math.inf


def interval_of(config: EngineConfig) -> float:
    """Return the seconds between two heartbeats; infinity for none."""
    return patience_of(config) / SIGNS


@attrs.define(eq=False)
class Heartbeat:
    """The heartbeat of one front end, as the engine process watches it.

    Args:
        patience: seconds without a heartbeat after which the front end counts as hung.
    """

    patience: float
    _due: float = attrs.field(init=False, default=math.inf)
    """Time from which the front end counts as hung."""
    _is_forgiven: bool = attrs.field(init=False, default=False)
    """True if it was given its time again, and has sent nothing since."""
    _overdue: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    def beat(self) -> None:
        """Note a heartbeat."""
        self._is_forgiven = False
        self._wait_again()

    def _wait_again(self) -> None:
        self._due = trio.current_time() + self.patience
        self._overdue.deadline = self._due

    async def watch(self) -> None:
        """Block until no heartbeat has come for too long.

        Raises:
            FrontEndLost: none has come.
        """
        self._wait_again()
        while True:
            with trio.CancelScope(deadline=self._due) as self._overdue:
                await trio.sleep_forever()
            if trio.current_time() - self._due > MAX_LATENESS and not self._is_forgiven:
                # This process was stopped itself, and the front end may have been, too.
                self._is_forgiven = True
                self._wait_again()
                continue
            # Messages that came while this process was held up are taken first.
            await trio.sleep(SECOND_LOOK)
            if trio.current_time() >= self._due:
                message = f"no sign of life within {self.patience:g} s (--watchdog-timeout)"
                raise FrontEndLost(message, is_hung=True)
