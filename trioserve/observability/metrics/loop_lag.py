"""The lag of the event loop, measured by a task that sleeps and compares the time.

Slow callbacks, garbage collections and a busy machine show up here, and nowhere else: they delay
every token and every new connection.
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
"""Seconds that a peak stays visible: the usual time between two scrapes of Prometheus."""
WARN_AFTER = 1.0
"""Seconds of lag that are logged."""
WARN_INTERVAL = 10.0
"""The least seconds between two such log lines."""

_log = get_logger("trioserve.loop")


@attrs.define(eq=False)
class LoopLag:
    """Measurements of the lag: a histogram of all, and the newest ones for their peak."""

    histogram: Histogram = attrs.field(factory=lambda: Histogram(LOOP_LAG_SECONDS))
    _recent: deque[float] = attrs.field(factory=lambda: deque(maxlen=round(WINDOW / INTERVAL)))

    @property
    def peak(self) -> float:
        """The largest of the newest measurements, in seconds."""
        return max(self._recent, default=0.0)

    def observe(self, seconds: float) -> None:
        """Record a lag of ``seconds``."""
        self.histogram.observe(seconds)
        self.remember(seconds)

    def remember(self, seconds: float) -> None:
        """Count ``seconds`` for the peak alone; another process measured it."""
        self._recent.append(seconds)


async def measure_loop_lag(lag: LoopLag) -> None:
    """Measure the lag ten times a second. Servers run this: it would keep a virtual clock busy.

    While the loop hangs, a thread logs it.
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
