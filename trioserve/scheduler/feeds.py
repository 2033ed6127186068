"""Counters and event streams of a scheduler; they outlive its workers."""

from __future__ import annotations

import attrs

from trioserve.observability.scheduler_statistics import Counters
from trioserve.scheduler.cache_events import CacheEvents
from trioserve.scheduler.iterations import Iterations


@attrs.define(eq=False)
class Feeds:
    """The counters, which always run, and the feeds, which cost nothing without readers."""

    counters: Counters = attrs.field(init=False, factory=Counters)
    iterations: Iterations = attrs.field(init=False)

    cache: CacheEvents = attrs.field(init=False, factory=CacheEvents)

    def __attrs_post_init__(self) -> None:
        self.iterations = Iterations(self.counters)

    def close(self, error: Exception) -> None:
        """End the feeds: readers get ``error``. Idempotent."""
        self.iterations.feed.close(error)
        self.cache.feed.close(error)
