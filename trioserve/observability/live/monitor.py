"""The sources of snapshots, and subscriptions to them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs
import trio

from trioserve._util.feed import Feed
from trioserve.engine.worker_group import WorkerGroup
from trioserve.observability.health import Patient, health_word
from trioserve.observability.live.figures import Lately, Look, Tally, latency_of, rates_of
from trioserve.observability.live.prefix import prefix_of_all
from trioserve.observability.live.requests import request_row, shown_requests
from trioserve.observability.live.schema import (
    Counts,
    Prefix,
    RequestRow,
    Snapshot,
    TaskNode,
    WorkerState,
)
from trioserve.observability.live.tasks import task_tree
from trioserve.observability.live.workers import WatchedWorkers, pages_of
from trioserve.observability.metrics import Metrics
from trioserve.observability.statistics import EngineStatistics
from trioserve.protocol import wire
from trioserve.protocol.errors import WatcherLimit
from trioserve.requests.adapters import Adapter
from trioserve.requests.request import Request
from trioserve.scheduler.core import SchedulerCore
from trioserve.workers.supervisor import WorkerLife

DEFAULT_REQUESTS = 200
MAX_REQUESTS = 1000
"""The most requests in a snapshot."""
DEFAULT_NODES = 300
MAX_NODES = 2000
"""The most nodes of the prefix tree in a snapshot."""
MAX_WATCHERS = 16
"""The most subscriptions to one engine: each snapshot takes some of its time."""
STAY_SECONDS = 10.0
"""Seconds for which a finished request stays in snapshots."""

Departure = tuple[float, RequestRow]
"""Time of a request's end on trio's clock, and its row at that time."""


def unix_offset() -> float:
    """Return the difference of Unix time and trio's clock."""
    return time.time() - trio.current_time()


class DescribedEngine(Protocol):
    """The parts of an engine that stay as they are while it is watched."""

    @property
    def ready(self) -> wire.Ready: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def adapters(self) -> tuple[Adapter, ...]: ...


class MonitoredEngine(Patient, Protocol):
    """The parts of an engine that snapshots are taken of."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def weight_version(self) -> str: ...

    @property
    def newest_requests(self) -> Iterator[Request]: ...

    @property
    def worker_group(self) -> WorkerGroup: ...

    @property
    def closed_requests(self) -> Feed[Request]: ...

    def statistics(self) -> EngineStatistics: ...


@attrs.frozen(kw_only=True)
class Monitor:
    """The sources of an engine's snapshots, in the process that has its schedulers."""

    workers: WorkerGroup
    departures: Feed[Request]
    """Requests as they end. They are published while a subscription is open."""
    open_requests: Callable[[], Iterator[Request]]
    """Open requests, the newest first."""
    statistics: Callable[[], EngineStatistics]
    tally: Callable[[], Tally]
    health: Callable[[], str]
    weight_version: Callable[[], str]

    @classmethod
    def of(cls, engine: MonitoredEngine) -> Monitor:
        """Return the monitor of an engine with its schedulers in this process."""
        return cls(
            workers=engine.worker_group,
            departures=engine.closed_requests,
            open_requests=lambda: engine.newest_requests,
            statistics=engine.statistics,
            tally=lambda: Tally.of(engine.metrics),
            health=lambda: health_word(engine),
            weight_version=lambda: engine.weight_version,
        )

    @property
    def cores(self) -> dict[int, SchedulerCore]:
        """The cores of the workers that have been attached, by the workers' numbers."""
        cores = {each.index: each.scheduler.core for each in self.workers if each.state != "ended"}
        return {index: core for index, core in cores.items() if core is not None}

    def row_of(self, request: Request, offset: float, *, is_over: bool = False) -> RequestRow:
        """Return the row of ``request`` now; ``offset`` is the difference of Unix time and trio's
        clock.
        """
        return request_row(
            request,
            adapter_name=self.workers.schedulers.adapters.name_of,
            worker=None if request.scheduler is None else request.scheduler.index,
            offset=offset,
            now=trio.current_time(),
            is_over=is_over,
        )

    @contextlib.contextmanager
    def watched(self, *, requests: int, nodes: int) -> Iterator[SnapshotSubscription]:
        """Open a subscription for the block.

        Args:
            requests: the most requests in a snapshot, up to :data:`MAX_REQUESTS`.
            nodes: the most nodes of the prefix tree, up to :data:`MAX_NODES`.

        Raises:
            WatcherLimit: :data:`MAX_WATCHERS` subscriptions are open already.
        """
        if self.departures.num_readers >= MAX_WATCHERS:
            raise WatcherLimit(f"{MAX_WATCHERS} watch the engine already; that is the limit")
        departures = RecentRequests(self, max(requests, 1))
        workers = WatchedWorkers(self.workers)
        with self.departures.read_by(departures), workers.opened():
            yield SnapshotSubscription(self, departures, workers, requests, nodes)


class RecentRequests:
    """The newest rows of requests that ended since the last snapshot.

    A row is made at the request's end: later its pages are unknown.
    """

    def __init__(self, monitor: Monitor, max_rows: int) -> None:
        self._monitor = monitor
        self._rows: deque[Departure] = deque(maxlen=max_rows)
        self._error: Exception | None = None

    def put(self, record: Request) -> None:
        """Add the row of a request that has ended."""
        row = self._monitor.row_of(record, unix_offset(), is_over=True)
        self._rows.append((trio.current_time(), row))

    def end(self, error: Exception) -> None:
        """Have :meth:`check_open` raise ``error``."""
        self._error = error

    def check_open(self) -> None:
        """Raise the error that ended the engine, if it has ended."""
        if self._error is not None:
            raise self._error

    def take(self) -> list[Departure]:
        """Return the rows, and forget them."""
        rows = list(self._rows)
        self._rows.clear()
        return rows


class SnapshotSubscription:
    """A subscription to ``monitor``; each snapshot covers the time since the one before."""

    def __init__(
        self,
        monitor: Monitor,
        departures: RecentRequests,
        workers: WatchedWorkers,
        max_requests: int,
        max_nodes: int,
    ) -> None:
        self._monitor = monitor
        self._departures = departures
        self._workers = workers
        self._max_requests = max_requests
        self._max_nodes = max_nodes
        self._lately = Lately()
        self._ended: deque[Departure] = deque(maxlen=max_requests)
        """Finished requests that are still shown, oldest first."""
        self._look = self._look_at(monitor.statistics())
        self._lately.add(self._look)

    def take(self, processes: Sequence[TaskNode] | None = None) -> Snapshot:
        """Return a snapshot of this moment. Never blocks.

        Args:
            processes: the tasks of the other processes, if there are any.

        Raises:
            EngineError: the engine is closed.
        """
        self._departures.check_open()
        monitor = self._monitor
        offset = unix_offset()
        statistics = monitor.statistics()
        before, self._look = self._look, self._look_at(statistics)
        since = self._lately.add(self._look)
        workers = self._workers.take(offset)
        rows = self._rows(offset)
        return Snapshot(
            now=self._look.time + offset,
            health=monitor.health(),
            paused=monitor.workers.schedulers.paused,
            weight_version=monitor.weight_version(),
            worker=_worker_state(monitor.workers.life, statistics.worker_restarts, offset),
            counts=self._counts(statistics),
            pages=pages_of(statistics.scheduler),
            rates=rates_of(before, self._look, workers.iterations),
            latency=latency_of(since, self._look),
            requests=rows,
            num_requests_left_out=max(
                statistics.num_streams - sum(row.state != "finished" for row in rows), 0
            ),
            prefix=self._prefix(),
            tasks=_whole_tree(processes),
            steps=workers.steps,
            workers=workers.rows,
        )

    def _look_at(self, statistics: EngineStatistics) -> Look:
        return Look(trio.current_time(), statistics.scheduler, self._monitor.tally())

    def _rows(self, offset: float) -> list[RequestRow]:
        monitor = self._monitor
        self._ended.extend(self._departures.take())
        while self._ended and self._ended[0][0] < trio.current_time() - STAY_SECONDS:
            self._ended.popleft()
        running = (
            each.sequence.request for core in monitor.cores.values() for each in core.running
        )
        shown = shown_requests(running, monitor.open_requests(), self._max_requests)
        rows = [monitor.row_of(each, offset) for each in shown]
        # Finished requests get the room that the others leave, but always a quarter.
        room = max(self._max_requests - len(rows), self._max_requests // 4)
        ended = [row for _, row in self._ended][max(len(self._ended) - room, 0) :]
        rows = [*rows[: self._max_requests - len(ended)], *ended]
        rows.sort(key=lambda row: row.timeline[0][1], reverse=True)
        return rows

    def _counts(self, statistics: EngineStatistics) -> Counts:
        finished = self._look.tally.finished
        return Counts(
            tokenizing=statistics.num_tokenizing,
            waiting=statistics.scheduler.num_waiting,
            running=statistics.scheduler.num_running,
            preempted=sum(len(core.preempted) for core in self._monitor.cores.values()),
            streams=statistics.num_streams,
            sessions=statistics.num_sessions,
            finished_total=sum(finished.values()),
            aborted_total=finished.get("abort", 0),
            errors_total=finished.get("error", 0),
        )

    def _prefix(self) -> Prefix:
        caches = {index: core.memory.prefix for index, core in self._monitor.cores.items()}
        return prefix_of_all(caches, self._max_nodes)


def _worker_state(life: WorkerLife, restarts: int, offset: float) -> WorkerState:
    return WorkerState(
        pid=life.pid,
        rank_pids=tuple(life.rank_pids),
        state=life.state,
        restarts=restarts,
        since=life.since + offset,
        last_death=life.last_loss,
    )


def _whole_tree(others: Sequence[TaskNode] | None) -> TaskNode:
    own = task_tree()
    if others is None:
        return own
    engine = TaskNode(name="engine", state="", children=[own])
    return TaskNode(name="server", state="", children=[engine, *others])
