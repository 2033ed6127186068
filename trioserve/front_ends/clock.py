"""Times that two processes agree on: trio's clock begins anywhere, the system's does not."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import trio


@attrs.frozen
class SharedClock:
    """Turns times of this trio program into those that go into messages, and back.

    Messages have the times of the engine process's system.
    """

    _offset: Callable[[], float]
    """Returns the seconds by which trio's clock is ahead of that system's."""

    @classmethod
    def now(cls) -> SharedClock:
        """Return the clock of the running trio program on the engine process's system."""
        offset = trio.current_time() - time.perf_counter()
        return cls(lambda: offset)

    def shared(self, time: float) -> float:
        """Return a time of this program as messages have it."""
        return time - self._offset()

    def own(self, time: float) -> float:
        """Return a message's time on this program's clock; it is never in the future."""
        return min(time + self._offset(), trio.current_time())
