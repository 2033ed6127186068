"""What an engine is doing at one moment, in numbers."""

from __future__ import annotations

import attrs

from trioserve.scheduler.statistics import SchedulerStatistics

__all__ = ["EngineStatistics"]


@attrs.frozen
class EngineStatistics:
    """What an engine is doing at this moment.

    ``num_tokenizing`` outputs are asked for by requests that are not yet in the queue;
    ``num_streams`` scopes are open; ``stream_bytes`` of output wait for slow readers.
    """

    scheduler: SchedulerStatistics
    num_tokenizing: int
    num_streams: int
    stream_bytes: int
    worker_restarts: int
