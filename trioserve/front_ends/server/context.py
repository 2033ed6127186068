"""What all front ends share in the engine process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import attrs

from trioserve.engine.sessions.sessions import Sessions
from trioserve.front_ends.clock import SharedClock
from trioserve.observability.live import Monitor
from trioserve.observability.live.schema import TaskNode
from trioserve.requests.request import Finish, Request, Sequence


class SchedulerPart(Protocol):
    """What is needed of the :class:`~trioserve.scheduler.scheduler.Scheduler`."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens, prompt and output so far."""

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent."""


@attrs.frozen(kw_only=True)
class ServerContext:
    """The parts of the engine process that a front end meets."""

    scheduler: SchedulerPart
    enter: Callable[[Request], None]
    """Counts a request among those that wait; raises ``QueueFull`` or ``Paused``."""
    forget: Callable[[Request], None]
    """A request that was counted is over."""
    submit: Callable[[Request], None]
    """Takes a request in, behind those that came before."""
    clock: SharedClock
    on_line: Callable[[], None]
    """Called when somebody may have joined the line, or left it."""
    permits: Counter[str]
    """Requests that are open of each limited key."""
    max_seats: int
    """How many may be, of one key."""
    sessions: Sessions
    monitor: Monitor
    """What pictures are taken of."""
    look_around: Callable[[], Awaitable[list[TaskNode]]]
    """Asks all front ends how they are."""
    patience: float
    """Seconds after which a front end counts as hung that gives no sign of life."""
