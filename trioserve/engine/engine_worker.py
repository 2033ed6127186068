"""One of an engine's workers, as the engine's process has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.observability.metrics import Metrics
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol import wire
from trioserve.protocol.joining import WorkerRole
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.step_time import StepLoad
from trioserve.workers import Link
from trioserve.workers.link import LinkTraffic
from trioserve.workers.supervisor import OpenWorker, Supervisor


@attrs.define(eq=False)
class EngineWorker:
    """The scheduler of a worker, and the supervisor of its process."""

    scheduler: Scheduler
    supervisor: Supervisor
    traffic: LinkTraffic
    dismiss: Callable[[str], None] = lambda _: None
    """Called with the reason before the worker is ended for good."""
    free_device: Callable[[], None] = lambda: None
    """Called when its process has ended for good."""
    role: WorkerRole = "both"
    """The part of each request that it computes."""
    device: str = attrs.field(init=False, default="")
    """Name of the device; empty while the first process loads."""
    draining: bool = attrs.field(init=False, default=False)
    """True while it is being removed."""
    joining: bool = attrs.field(init=False, default=False)
    """True while it is being added: it may have loaded the model, and gets no requests yet."""

    @classmethod
    def of(
        cls,
        index: int,
        config: EngineConfig,
        metrics: Metrics,
        open_worker: OpenWorker,
        *,
        traffic: LinkTraffic | None = None,
        wait_here: Callable[[], Awaitable[None]] | None = None,
        dismiss: Callable[[str], None] = lambda _: None,
    ) -> EngineWorker:
        """Return a worker that isn't started yet.

        Args:
            index: Its number.
            config: The engine's options.
            metrics: The engine's metrics.
            open_worker: Opens its life.
            traffic: Measures of the links to it.
            wait_here: Blocks until its life can be opened.
            dismiss: Called with the reason before it is ended for good.
        """
        scheduler = Scheduler(config, metrics, index)
        supervisor = Supervisor(
            open_worker=open_worker,
            wait_here=wait_here,
            max_restarts=config.max_worker_restarts,
            judge=scheduler.judge,
            worker_power=scheduler.worker_power,
            on_loss=metrics.worker_lost,
            on_replaced=metrics.worker_replaced,
            index=index,
        )
        made = cls(scheduler, supervisor, traffic or LinkTraffic(), dismiss)
        made.role = config.role_of(index)
        return made

    async def run(self, task_status: trio.TaskStatus[wire.Ready]) -> None:
        """Run the worker's processes, as :meth:`~trioserve.workers.supervisor.Supervisor.run`."""
        await self.supervisor.run(self._attach, task_status=task_status)

    async def _attach(self, link: Link, ready: wire.Ready) -> None:
        self.device = ready.device_name
        if not ready.lends_pages:
            self.scheduler.feeds.siblings = None
        await self.scheduler.attach(link, ready)

    def amend(self, start: wire.Start) -> wire.Start:
        """Return what the next process loads: with the present weights, and for its role.

        It loads what grammars need if one has come to any worker, because a request with one may
        move to it as soon as it serves.
        """
        return attrs.evolve(
            start,
            weights=self.scheduler.weights.path,
            has_grammars=self.scheduler.feeds.had_grammars.is_set(),
            hands_over=start.hands_over or self.role != "both",
        )

    @property
    def index(self) -> int:
        """Its number, which no other worker of the engine ever has."""
        return self.scheduler.index

    @property
    def state(self) -> str:
        """The state as :attr:`~trioserve.observability.worker_report.WorkerReport.state`."""
        if self.joining:
            return "starting"
        state = self.supervisor.life.state
        if state != "running":
            return state
        if self.draining:
            return "draining"
        return "stalled" if self.scheduler.stalled else state

    def report(self) -> WorkerReport:
        """Return the worker's state at this moment."""
        life, counts = self.supervisor.life, self.scheduler.statistics()
        core = self.scheduler.core
        step = StepLoad(decodes=counts.num_running + 1)
        round_trip = self.traffic.round_trip
        return WorkerReport(
            index=self.index,
            state=self.state,
            role=self.role,
            device=self.device,
            pid=life.pid,
            rank_pids=tuple(life.rank_pids),
            host=self.traffic.host,
            restarts=self.supervisor.restarts,
            last_loss=life.last_loss,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_steps=counts.num_steps,
            pages_total=counts.pages_total,
            pages_free=counts.pages_free,
            pages_cached=counts.pages_cached,
            decode_ms=0.0 if core is None else 1000 * core.step_times.predict(step),
            plan_bytes=self.traffic.plan_bytes,
            round_trip_ms=None if round_trip is None else round(1000 * round_trip, 3),
        )


class MakeWorker(Protocol):
    """Function that makes the worker of a number, which isn't started yet."""

    def __call__(self, index: int, device: str | None = None) -> EngineWorker:
        """Return the worker ``index``, on ``device`` if that is given.

        Raises:
            InvalidRequest: There is no device for it.
        """
        ...
