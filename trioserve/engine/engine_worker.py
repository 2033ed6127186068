"""One of an engine's workers, as the engine's process has it."""

from __future__ import annotations

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.observability.metrics import Metrics
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol import wire
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.step_time import StepLoad
from trioserve.workers import Link
from trioserve.workers.supervisor import OpenWorker, Supervisor


@attrs.define(eq=False)
class EngineWorker:
    """The scheduler of a worker, and the supervisor of its process."""

    index: int
    """Its number, which no other worker of the engine ever has."""
    scheduler: Scheduler
    supervisor: Supervisor
    device: str = attrs.field(init=False, default="")
    """Name of the device; empty while the first process loads."""
    draining: bool = attrs.field(init=False, default=False)
    """True while it is being removed."""

    @classmethod
    def of(
        cls, index: int, config: EngineConfig, metrics: Metrics, open_worker: OpenWorker
    ) -> EngineWorker:
        """Return a worker that isn't started yet; ``open_worker`` opens its life."""
        scheduler = Scheduler(config, metrics, index)
        supervisor = Supervisor(
            open_worker=open_worker,
            max_restarts=config.max_worker_restarts,
            judge=scheduler.judge,
            worker_power=scheduler.worker_power,
            on_loss=metrics.worker_lost,
            on_replaced=metrics.worker_replaced,
        )
        return cls(index, scheduler, supervisor)

    async def run(self, task_status: trio.TaskStatus[wire.Ready]) -> None:
        """Run the worker's processes, as :meth:`~trioserve.workers.supervisor.Supervisor.run`."""
        await self.supervisor.run(self._attach, task_status=task_status)

    async def _attach(self, link: Link, ready: wire.Ready) -> None:
        self.device = ready.device_name
        await self.scheduler.attach(link, ready)

    @property
    def state(self) -> str:
        """The state as :attr:`~trioserve.observability.worker_report.WorkerReport.state`."""
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
        return WorkerReport(
            index=self.index,
            state=self.state,
            device=self.device,
            pid=life.pid,
            restarts=self.supervisor.restarts,
            last_loss=life.last_loss,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_steps=counts.num_steps,
            pages_total=counts.pages_total,
            pages_free=counts.pages_free,
            pages_cached=counts.pages_cached,
            decode_ms=0.0 if core is None else 1000 * core.step_times.predict(step),
        )
