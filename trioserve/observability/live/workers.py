"""The workers in a snapshot: the state of each, and its steps since the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import attrs
import trio

from trioserve._util.feed import Subscription
from trioserve.engine.engine_worker import EngineWorker
from trioserve.observability.live.figures import worker_rates_of
from trioserve.observability.live.schema import Pages, Step, WorkerRow
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.scheduler.iterations import Iteration

MAX_STEPS = 50
"""The most steps in a snapshot."""


@attrs.define(eq=False)
class _WatchedWorker:
    """One worker, with its steps and its counters at the last snapshot."""

    worker: EngineWorker
    iterations: Subscription[Iteration]
    scope: contextlib.ExitStack
    """Its closing ends the subscription to the steps."""
    time: float
    counters: SchedulerStatistics
    plan_bytes: int


@attrs.frozen
class WorkersLook:
    """The workers of a snapshot."""

    rows: list[WorkerRow]
    steps: list[Step]
    """The newest steps since the last snapshot, as many of each worker, oldest first."""
    iterations: list[Iteration]
    """All steps that were recorded since the last snapshot."""


@attrs.define(eq=False)
class WatchedWorkers:
    """The workers of one subscription. Those that are added and removed meanwhile are followed."""

    _workers: Iterable[EngineWorker]
    _watched: dict[EngineWorker, _WatchedWorker] = attrs.field(init=False, factory=dict)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Record the steps of all workers in the block."""
        try:
            self._follow()
            yield
        finally:
            for each in self._watched.values():
                each.scope.close()

    def take(self, offset: float) -> WorkersLook:
        """Return the workers now; ``offset`` is the difference of Unix time and trio's clock."""
        self._follow()
        rows: list[WorkerRow] = []
        steps: list[Step] = []
        iterations: list[Iteration] = []
        most = max(MAX_STEPS // max(len(self._watched), 1), 1)
        for each in self._watched.values():
            taken = each.iterations.take()
            rows.append(_row(each, taken, offset))
            steps += [_step(each.worker.index, step, offset) for step in taken[-most:]]
            iterations += taken
        steps.sort(key=lambda step: step.at)
        return WorkersLook(rows, steps[-MAX_STEPS:], iterations)

    def _follow(self) -> None:
        present = list(self._workers)
        for gone in self._watched.keys() - present:
            self._watched.pop(gone).scope.close()
        for worker in present:
            if worker not in self._watched:
                scheduler, scope = worker.scheduler, contextlib.ExitStack()
                iterations = scope.enter_context(
                    scheduler.feeds.iterations.feed.subscribe(MAX_STEPS)
                )
                self._watched[worker] = _WatchedWorker(
                    worker,
                    iterations,
                    scope,
                    trio.current_time(),
                    scheduler.statistics(),
                    worker.traffic.plan_bytes,
                )


def pages_of(statistics: SchedulerStatistics) -> Pages:
    """Return the pages of one worker, or of several together."""
    return Pages(
        total=statistics.pages_total,
        free=statistics.pages_free,
        cached=statistics.pages_cached,
        held=statistics.pages_held,
        host_total=statistics.host_pages_total,
        host_used=statistics.host_pages_cached,
    )


def _row(watched: _WatchedWorker, iterations: list[Iteration], offset: float) -> WorkerRow:
    """Return the row of a worker; its rates are those since the last one."""
    worker, now = watched.worker, trio.current_time()
    report, statistics = worker.report(), worker.scheduler.statistics()
    seconds, was = now - watched.time, watched.counters
    num_plans = statistics.num_steps - was.num_steps
    plan_bytes = report.plan_bytes - watched.plan_bytes
    watched.time, watched.counters, watched.plan_bytes = now, statistics, report.plan_bytes
    return WorkerRow(
        index=report.index,
        state=report.state,
        device=report.device,
        pid=report.pid,
        rank_pids=report.rank_pids,
        host=report.host,
        restarts=report.restarts,
        since=worker.supervisor.life.since + offset,
        last_loss=report.last_loss,
        running=report.num_running,
        waiting=report.num_waiting,
        decode_ms=report.decode_ms,
        plan_bytes=plan_bytes / num_plans if num_plans else None,
        round_trip_ms=report.round_trip_ms,
        pages=pages_of(SchedulerStatistics() if report.state == "ended" else statistics),
        rates=worker_rates_of(seconds, was, statistics, iterations),
    )


def _step(worker: int, iteration: Iteration, offset: float) -> Step:
    return Step(
        number=iteration.number,
        worker=worker,
        at=round(iteration.time + offset, 4),
        rows_prefill=iteration.num_prefills,
        rows_decode=iteration.num_sequences - iteration.num_prefills,
        tokens=iteration.num_prefill_tokens + iteration.num_decode_tokens,
        ms=iteration.step_us / 1000,
        idle_ms=iteration.idle_us / 1000,
    )
