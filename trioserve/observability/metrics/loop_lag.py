"""How late the event loop is: a task that sleeps, and looks how much too long it slept.

Whoever holds the loop up (a slow callback, a garbage collection, a busy machine) shows up here, and
nowhere else: it delays every token and every new connection alike.
"""

from __future__ import annotations

import math
from collections import deque

import attrs
import trio

from trioserve.observability.logs import get_logger
from trioserve.observability.metrics.hang_watch import HangWatch
from trioserve.observability.metrics.histogram import LOOP_LAG_SECONDS, Histogram

INTERVAL = 0.1
"""Seconds between two measurements."""
WINDOW = 15.0
"""Seconds that a peak stays visible: as long as Prometheus usually waits between two scrapes."""
WARN_AFTER = 1.0
"""Seconds of lag that are told in the log."""
WARN_INTERVAL = 10.0
"""Seconds between two such lines, at least."""

_log = get_logger("trioserve.loop")


@attrs.define(eq=False)
class LoopLag:
    """The measurements: all of them as a histogram, the newest for their peak."""

    histogram: Histogram = attrs.field(factory=lambda: Histogram(LOOP_LAG_SECONDS))
    _recent: deque[float] = attrs.field(factory=lambda: deque(maxlen=round(WINDOW / INTERVAL)))

    @property
    def peak(self) -> float:
        """The largest of the newest measurements, in seconds."""
        return max(self._recent, default=0.0)

    def observe(self, seconds: float) -> None:
        """The loop was late by ``seconds``."""
        self.histogram.observe(seconds)
        self.remember(seconds)

    def remember(self, seconds: float) -> None:
        """Count ``seconds`` for the peak alone, as one that was measured elsewhere."""
        self._recent.append(seconds)


async def measure_loop_lag(lag: LoopLag) -> None:
    """The task: measure ten times a second. For servers: it would keep a virtual clock busy.

    While the loop hangs, a thread says so.
    """
    last_warning = -math.inf
    with HangWatch() as watch:
        while True:
            due = trio.current_time() + INTERVAL
            await trio.sleep_until(due)
            watch.beat()
            now = trio.current_time()
            lag.observe(now - due)
            if now - due >= WARN_AFTER and now - last_warning >= WARN_INTERVAL:
                last_warning = now
                _log.warning("event loop was held up", seconds=round(now - due, 3))
