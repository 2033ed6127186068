"""What a scheduler tells whoever listens. It outlives workers, and so the memory of each."""

from __future__ import annotations

import attrs

from trioserve.observability.scheduler_statistics import Counters
from trioserve.scheduler.cache_events import CacheEvents
from trioserve.scheduler.iterations import Iterations


@attrs.define(eq=False)
class Feeds:
    """The counters, which always run, and the feeds, which have nothing to do without readers."""

    counters: Counters = attrs.field(init=False, factory=Counters)
    iterations: Iterations = attrs.field(init=False)

    cache: CacheEvents = attrs.field(init=False, factory=CacheEvents)

    def __attrs_post_init__(self) -> None:
        self.iterations = Iterations(self.counters)

    def close(self, error: Exception) -> None:
        """Nothing more will be told: readers get ``error``. Idempotent."""
        self.iterations.feed.close(error)
        self.cache.feed.close(error)
