"""The parts of the engine process that all front ends share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import attrs

from trioserve.engine.cache_feed import CacheFeed
from trioserve.engine.sessions.sessions import Sessions
from trioserve.front_ends.clock import SharedClock
from trioserve.observability.live import Monitor
from trioserve.observability.live.schema import TaskNode
from trioserve.requests.media.encoder import WorkerMediaEncoder
from trioserve.requests.request import Finish, Request, Sequence


class SchedulersPart(Protocol):
    """The part of :class:`~trioserve.engine.schedulers.Schedulers` for front ends."""

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for a slot."""

    @property
    def num_waiting_tokens(self) -> int:
        """The tokens of waiting sequences, prompt and output so far."""

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent."""


@attrs.frozen(kw_only=True)
class ServerContext:
    """The parts of the engine process that a front end meets."""

    schedulers: SchedulersPart
    enter: Callable[[Request], None]
    """Counts a waiting request; raises ``QueueFull`` or ``Paused``."""
    forget: Callable[[Request], None]
    """Stops counting a request, which has ended."""
    submit: Callable[[Request], None]
    """Takes a request in, behind those that came before."""
    clock: SharedClock
    on_queue_change: Callable[[], None]
    """Called when the queue may have changed."""
    permits: Counter[str]
    """Open requests of each limited key."""
    max_seats: int
    """Limit of the open requests of one key."""
    sessions: Sessions
    monitor: Monitor
    """The source of snapshots."""
    caches: CacheFeed
    """The prefix caches of all workers."""
    look_around: Callable[[], Awaitable[list[TaskNode]]]
    """Asks all front ends for their parts of a snapshot."""
    media: WorkerMediaEncoder
    """The encoder of images that front ends have read."""
    patience: float
    """Seconds without a heartbeat after which a front end counts as hung."""
