"""Times that two processes agree on: trio's clock begins anywhere, the system's does not."""

from __future__ import annotations

import time

import attrs
import trio


@attrs.frozen
class SharedClock:
    """Turns times of this trio program into those that go into messages, and back."""

    _offset: float
    """What trio's clock is ahead of the system's."""

    @classmethod
    def now(cls) -> SharedClock:
        """The clock of the trio program that runs."""
        return cls(trio.current_time() - time.perf_counter())

    def shared(self, time: float) -> float:
        """A time of this program's, for a message."""
        return time - self._offset

    def own(self, time: float) -> float:
        """A message's time, as this program counts."""
        return time + self._offset
