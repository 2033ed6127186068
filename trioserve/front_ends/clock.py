"""Times that two processes agree on: trio's clock begins anywhere, the system's does not."""

from __future__ import annotations

import time

import attrs
import trio


@attrs.frozen
class SharedClock:
    """Turns times of this trio program into those that go into messages, and back."""

    _offset: float
    """Seconds by which trio's clock is ahead of the system's."""

    @classmethod
    def now(cls) -> SharedClock:
        """Return the clock of the running trio program."""
        return cls(trio.current_time() - time.perf_counter())

    def shared(self, time: float) -> float:
        """Return a time of this program as messages have it."""
        return time - self._offset

    def own(self, time: float) -> float:
        """Return a message's time on this program's clock."""
        return time + self._offset
