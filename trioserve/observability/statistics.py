"""The statistics of an engine at one moment."""

from __future__ import annotations

import attrs

from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.observability.worker_report import WorkerReport


@attrs.frozen
class EngineStatistics:
    """The statistics of an engine at one moment.

    ``num_tokenizing`` outputs belong to requests that are not yet in the queue; ``num_streams``
    streams are open; ``stream_bytes`` of output wait for slow readers; ``num_sessions`` sessions
    are open; ``front_end_restarts`` front ends were replaced, if there are any; ``memory_released``
    is true while the worker's memory is released; ``workers`` are the states of all workers.
    """

    scheduler: SchedulerStatistics
    num_tokenizing: int
    num_streams: int
    stream_bytes: int
    worker_restarts: int
    num_sessions: int = 0
    front_end_restarts: int = 0
    memory_released: bool = False
    workers: tuple[WorkerReport, ...] = ()

    def summary(self) -> str:
        """Return the numbers in a few readable lines."""
        scheduler = self.scheduler
        return (
            f"requests open: {self.num_streams}; outputs on their way to the line: "
            f"{self.num_tokenizing}, waiting: {scheduler.num_waiting}, running: "
            f"{scheduler.num_running}\n"
            f"plans in flight: {scheduler.plans_in_flight}; steps done: {scheduler.num_steps}; "
            f"pages held: {scheduler.pages_held} of {scheduler.pages_total}; "
            f"worker restarts: {self.worker_restarts}; "
            f"bytes that wait for readers: {self.stream_bytes}"
        )
