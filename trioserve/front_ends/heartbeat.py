"""Signs of life: how a front end that hangs is told from one that has nothing to say.

It says :class:`~trioserve.front_ends.messages.Alive` again and again, from its own event loop. If
that is stopped, or something holds the loop up for good, nothing comes any more.
"""

from __future__ import annotations

import math

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.protocol.errors import FrontEndLost
from trioserve.scheduler.scheduler import SECOND_LOOK
from trioserve.scheduler.watchdog import MAX_LATENESS

MIN_PATIENCE = 10.0
"""Seconds, however little ``watchdog_timeout`` is: a front end that is at its end says nothing
while its last spans leave, which may take
:data:`~trioserve.observability.tracing.FLUSH_SECONDS`."""
SIGNS = 4
"""That a front end gives within that time."""


def patience_of(config: EngineConfig) -> float:
    """Seconds without a sign after which a front end counts as hung; infinity for never."""
    return max(config.watchdog_timeout, MIN_PATIENCE) if config.watchdog_timeout else math.inf


def interval_of(config: EngineConfig) -> float:
    """Seconds between two signs; infinity for none."""
    return patience_of(config) / SIGNS


@attrs.define(eq=False)
class Heartbeat:
    """One front end's, as the engine process feels it.

    Args:
        patience: seconds without a sign after which it counts as hung.
    """

    patience: float
    _due: float = attrs.field(init=False, default=math.inf)
    """When it counts as hung."""
    _is_forgiven: bool = attrs.field(init=False, default=False)
    """Whether it was given its time again, and no sign has come since."""
    _overdue: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    def beat(self) -> None:
        """A sign has come."""
        self._is_forgiven = False
        self._wait_again()

    def _wait_again(self) -> None:
        self._due = trio.current_time() + self.patience
        self._overdue.deadline = self._due

    async def watch(self) -> None:
        """Wait until no sign has come for too long.

        Raises:
            FrontEndLost: that is so.
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
            # What came while this process was held up is to be taken first.
            await trio.sleep(SECOND_LOOK)
            if trio.current_time() >= self._due:
                message = f"no sign of life within {self.patience:g} s (--watchdog-timeout)"
                raise FrontEndLost(message, is_hung=True)
