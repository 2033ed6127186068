"""Counters, event streams and sources of pages of a scheduler; they outlive its workers."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve.observability.scheduler_statistics import Counters
from trioserve.requests.request import Request
from trioserve.scheduler.cache_events import CacheEvents
from trioserve.scheduler.iterations import Iterations
from trioserve.scheduler.prefix_index import WorkerPages
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.siblings import Siblings


@attrs.define(eq=False)
class Feeds:
    """The counters, which always run, the feeds, which are free without readers, and sources."""

    counters: Counters = attrs.field(init=False, factory=Counters)
    iterations: Iterations = attrs.field(init=False)

    cache: CacheEvents = attrs.field(init=False, factory=CacheEvents)
    indexed: WorkerPages | None = attrs.field(init=False, default=None)
    """The prefix cache in the index over all workers, if there are several."""
    disk_folders: dict[str, set[bytes]] = attrs.field(init=False, factory=dict)
    """Keys of the pages on disk by folder; the workers of one host have one dict."""
    siblings: Siblings | None = attrs.field(init=False, default=None)
    """Workers that lend each other pages; None if there are none."""
    had_grammars: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set once a request with a grammar has come; the workers of an engine have one event."""
    on_load_changed: Callable[[], None] | None = attrs.field(init=False, default=None)
    """Called after a change of the sequences that wait or run."""

    on_prefilled: Callable[[Request], bool] | None = attrs.field(init=False, default=None)
    """Called with a request whose prompt is computed and that another worker is to go on with;
    returns False if none can.
    """
    on_chunk: Callable[[SequenceState], None] | None = attrs.field(init=False, default=None)
    """Called with a sequence whose prompt is computed for another worker, once a plan has some of
    its tokens.
    """

    def __attrs_post_init__(self) -> None:
        self.iterations = Iterations(self.counters)

    def note_load(self) -> None:
        """Note that other sequences wait or run than before."""
        if self.on_load_changed is not None:
            self.on_load_changed()

    def close(self, error: Exception) -> None:
        """End the feeds: readers get ``error``. Idempotent."""
        self.iterations.feed.close(error)
        self.cache.feed.close(error)
