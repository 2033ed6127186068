"""The workers of an engine: started together, added and removed while the engine runs.

Workers of other hosts join and leave by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator

import attrs
import trio

from trioserve._util.together import all_together
from trioserve.config import EngineConfig
from trioserve.config.adapter_paths import named_paths
from trioserve.engine.engine_worker import EngineWorker, MakeWorker
from trioserve.engine.routing.placement import Placement
from trioserve.engine.routing.policy import Policy
from trioserve.engine.schedulers import Schedulers
from trioserve.engine.tasks import EngineTasks
from trioserve.engine.worker_making import MakeJoined, check_role, makers
from trioserve.observability.logs import get_logger
from trioserve.observability.metrics import Metrics
from trioserve.observability.worker_report import WorkerReport
from trioserve.pooling.batcher import supervised_batcher
from trioserve.protocol import wire
from trioserve.protocol.errors import (
    CallFailed,
    EngineError,
    InvalidRequest,
    ModelLoadError,
    TrioserveError,
    WorkerGone,
    WorkerLost,
)
from trioserve.protocol.joining import WorkerRole
from trioserve.scheduler.beams import StopStringAtEnd
from trioserve.workers.ray.port import RayPort
from trioserve.workers.remote.joined import JoinedWorker
from trioserve.workers.remote.port import WorkersPort
from trioserve.workers.supervisor import WorkerLife

_REMOVAL = "removal"
"""Key under which a worker is paused that is about to be removed."""
_log = get_logger("trioserve.engine")


@attrs.define(eq=False)
class WorkerGroup:
    """The workers of an engine, and their schedulers as one back end."""

    _config: EngineConfig
    _make: MakeWorker
    _workers: list[EngineWorker]
    schedulers: Schedulers
    """The schedulers of the workers."""
    _make_joined: MakeJoined
    port: WorkersPort | None = None
    """Port at which workers of other hosts join; None for none."""
    _tasks: EngineTasks | None = attrs.field(init=False, default=None)
    _numbers: Iterator[int] = attrs.field(init=False)
    """Numbers of the workers to come: none twice, even if its worker couldn't be started."""
    _joining: list[EngineWorker] = attrs.field(init=False, factory=list)
    """Workers that are being added."""
    _num_restarts: int = attrs.field(init=False, default=0)
    """Restarts of workers that were removed."""
    _ready: wire.Ready | None = attrs.field(init=False, default=None)
    """Message of the last worker that was added."""

    @_numbers.default
    def _numbers_from_here(self) -> Iterator[int]:
        return itertools.count(len(self._workers))

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        metrics: Metrics,
        make: MakeWorker,
        *,
        encodes: bool,
        port: WorkersPort | None = None,
        stop_string_at_end: StopStringAtEnd | None = None,
    ) -> WorkerGroup:
        """Return as many workers as the options say, which ``encodes`` texts or generate.

        More of them join at ``port``, if there is one. ``stop_string_at_end`` finds the stop
        strings of beams; None if there is no text.
        """

        make_worker, make_joined = makers(config, metrics, make, stop_string_at_end)
        workers = [make_worker(index) for index in range(config.num_workers)]
        batchers = [
            supervised_batcher(config, each.scheduler, each.supervisor, metrics)
            for each in (workers if encodes else ())
        ]
        policy = Policy(config.routing_policy, config.routing_temperature, config.seed or 0)
        placement = Placement(policy, splits_by_load=config.splits_by_load)
        schedulers = Schedulers([each.scheduler for each in workers], batchers, placement)
        for each in workers:
            placement.set_role(each.scheduler, each.role)
        return cls(config, make_worker, workers, schedulers, make_joined, port)

    async def start(self, tasks: EngineTasks, config: EngineConfig) -> wire.Ready:
        """Start all workers; return once they have loaded the model and all adapters.

        If there are none on this host, it returns once those that the port waits for have.

        Returns:
            The message of the first one, with the least limits of all.
        """
        self._tasks = tasks
        if self.port is not None:
            self.port.workers.on_new = self._on_joined
            await tasks.start(self.port.run)

        async def start(_: int, worker: EngineWorker) -> wire.Ready:
            ready: wire.Ready = await tasks.start(self.run_worker, worker)
            return ready

        every = await all_together(start, self._workers)
        for batcher, ready in zip(self.schedulers.batchers, every, strict=False):
            batcher.set_limits(ready)
            tasks.start_soon(batcher.run)
        if not every:
            assert self.port is not None
            await self.port.wait_complete()
            assert self._ready is not None
            every = [self._ready]
        await self.schedulers.adapters.load_first(named_paths(config.lora_modules))
        return attrs.evolve(every[0], max_model_len=min(each.max_model_len for each in every))

    async def run_worker(
        self, worker: EngineWorker, task_status: trio.TaskStatus[wire.Ready]
    ) -> None:
        """Run a worker and its successors. If they are given up, the others go on."""
        worker.supervisor.others_serve = functools.partial(self._others_serve, worker)
        try:
            await worker.run(task_status)
        except (ModelLoadError, WorkerLost) as error:
            if worker.scheduler.core is None or self.schedulers.batchers:
                raise
            if not self.schedulers.placement.give_up(worker.scheduler, str(error)):
                raise
            if isinstance(error, WorkerGone):
                _log.info("worker gone", worker=worker.index, reason=str(error))
                if worker in self._workers:
                    self._forget(worker)
            else:
                _log.error("worker given up", worker=worker.index, reason=str(error))
                worker.dismiss(f"it was given up: {error}")
                worker.free_device()

    def _others_serve(self, worker: EngineWorker) -> bool:
        return any(each.attached for each in self.schedulers if each is not worker.scheduler)

    def start_task(self, run: Callable[..., Awaitable[None]]) -> None:
        """Start a task of the engine."""
        assert self._tasks is not None
        self._tasks.start_soon(run)

    # ---- while the engine runs

    async def add(self, device: str | None = None, role: WorkerRole = "both") -> WorkerReport:
        """Start one more worker on this host; return once it serves.

        Args:
            device: Its device; None for the first one that no worker has.
            role: The part of each request that it computes.

        Raises:
            InvalidRequest: Nothing is computed now, there is no device for it, the engine's workers
                can't have that role, or the model is an encoder.
            CallFailed: The worker can't load the model, or Ray has no room for it.
        """
        self._check_changeable()
        check_role(self._config, role, loads_first=isinstance(self.port, RayPort))
        if isinstance(self.port, RayPort):
            index = await self.port.start_worker(device)
            worker = next(each for each in self._workers if each.index == index)
            worker.role = role
            self.schedulers.placement.set_role(worker.scheduler, role)
            return worker.report()
        async with self.schedulers.changing:
            worker = self._make(next(self._numbers), device)
            worker.role = role
            worker.scheduler.weights.path = self._weights_path
            try:
                with self._starting(worker):
                    await self._start_one(worker)
                    await self._complete(worker)
                    await self._take_in(worker)
            finally:
                if worker.joining:
                    worker.free_device()
        return worker.report()

    @contextlib.contextmanager
    def _starting(self, worker: EngineWorker) -> Iterator[None]:
        """Report a worker as starting until it is taken in, at most for the block."""
        worker.joining = True
        self._joining.append(worker)
        try:
            yield
        finally:
            self._joining.remove(worker)

    async def _take_in(self, worker: EngineWorker) -> None:
        """Give requests to a worker that serves."""
        is_on = all(each.worker_power.is_on for each in self.schedulers)
        worker.joining = False
        self._workers.append(worker)
        self.schedulers.placement.set_role(worker.scheduler, worker.role)
        self.schedulers.add(worker.scheduler)
        if not is_on:  # Memory was released meanwhile.
            await worker.scheduler.worker_power.turn_off()
        for each in self.schedulers:
            if not each.attached:  # Its requests needn't wait for its own next worker.
                self.schedulers.placement.move_requests(each)
        if self.port is not None:
            self.port.workers.notify()
        _log.info("worker added", worker=worker.index, workers=len(self._workers))

    @property
    def _weights_path(self) -> str:
        """Path of the weights that the workers have; empty if they are the model's own."""
        present = list(self.schedulers)
        return present[0].weights.path if present else ""

    # ---- workers of other hosts

    def _on_joined(self, joined: JoinedWorker) -> None:
        """Start a worker that has joined."""
        assert self._tasks is not None
        self._tasks.start_soon(self._add_joined, joined)

    async def _add_joined(self, joined: JoinedWorker) -> None:
        assert self.port is not None
        worker = self._make_joined(next(self._numbers), joined)
        joined.others_serve = functools.partial(self._others_serve, worker)
        worker.scheduler.weights.path = self._weights_path
        try:
            self._check_changeable()
            if joined.computes != "both":
                check_role(self._config, joined.computes)
                worker.role = joined.computes
            with self._starting(worker):
                await self._start_one(worker)
                async with self.schedulers.changing:
                    await self._complete(worker)
                    await self._take_in(worker)
        except TrioserveError as error:
            _log.warning("worker of another host not added", host=joined.host, reason=str(error))
            self.port.workers.forget(joined)
            await joined.turn_away(str(error))
        else:
            self.port.workers.note_serving(joined, worker.index)

    def _forget(self, worker: EngineWorker) -> None:
        """Forget a worker that is gone for good."""
        self._workers.remove(worker)
        self._num_restarts += worker.supervisor.restarts

    async def _start_one(self, worker: EngineWorker) -> None:
        """Start a worker beside the others; return once it has the model."""
        assert self._tasks is not None
        error = await self._tasks.start(self._try_to_run, worker)
        if error is not None:
            raise CallFailed("no worker could be added", str(error)) from error

    async def _complete(self, worker: EngineWorker) -> None:
        """Give a worker that has the model all else that the others have.

        Raises:
            CallFailed: The weights were exchanged while it started, it can't load an adapter, or it
                was lost.
        """
        if worker.scheduler.weights.path == self._weights_path:
            error = await self._load_adapters(worker)
        else:
            error = EngineError("the weights were exchanged while it started: try again")
            await worker.scheduler.worker_power.turn_off()
        if error is not None:
            raise CallFailed("no worker could be added", str(error)) from error

    async def _load_adapters(self, worker: EngineWorker) -> Exception | None:
        """Load all adapters on a worker; end it and return the error if that fails."""
        error: Exception | None = None
        serves = False
        try:
            await self.schedulers.adapters.load_all(worker.scheduler.adapters)
            serves = worker.supervisor.life.state != "ended"
        except (EngineError, InvalidRequest, WorkerLost) as failure:
            error = failure
        finally:
            if not serves:
                with trio.CancelScope(shield=True):
                    await worker.scheduler.worker_power.turn_off()
        return error if serves else error or WorkerLost("it isn't replaced any more")

    async def _try_to_run(
        self, worker: EngineWorker, task_status: trio.TaskStatus[Exception | None]
    ) -> None:
        """Run a worker as :meth:`run_worker`; report the error if it can't be started."""
        started = False
        group = self

        class Status:
            def started(self, ready: wire.Ready | None = None) -> None:
                nonlocal started
                started = True
                group._ready = ready
                task_status.started(None)

        try:
            await self.run_worker(worker, Status())
        except (EngineError, ModelLoadError, WorkerLost) as error:
            if started:
                raise
            task_status.started(error)

    async def remove(self, index: int) -> None:
        """End the worker of that number, once all of its requests have gone to others.

        Requests that may not move are finished first. Cancelling it keeps the worker.

        Raises:
            InvalidRequest: There is no such worker, or no other one.
        """
        self._check_changeable()
        async with self.schedulers.changing:
            worker = next((each for each in self._workers if each.index == index), None)
            if worker is None:
                raise InvalidRequest(f"there is no worker {index}", param="index")
            if list(self.schedulers) == [worker.scheduler]:
                raise InvalidRequest("the last worker can't be removed", param="index")
            worker.draining = True
            try:
                with self.schedulers.placement.retiring(worker.scheduler):
                    await self._drain(worker)
            finally:
                worker.draining = False
            self._forget(worker)
        worker.dismiss("it was removed")
        try:
            await worker.scheduler.worker_power.turn_off()
        finally:
            worker.free_device()
        _log.info("worker removed", worker=index, workers=len(self._workers))

    async def _drain(self, worker: EngineWorker) -> None:
        """Move all requests of a worker on which none is placed any more."""
        scheduler = worker.scheduler
        if scheduler.core is None:
            return
        try:
            await self.schedulers.placement.vacate(scheduler, _REMOVAL)
        finally:
            scheduler.pause_control.resume(_REMOVAL)
        await scheduler.pause_control.wait_finished(scheduler.core.num_arrivals)

    def _check_changeable(self) -> None:
        """Refuse changes that a pause or an encoder makes impossible."""
        if self.schedulers.batchers:
            raise InvalidRequest("workers of an encoder are added at the start only")
        every = list(self.schedulers)
        are_on = all(each.worker_power.is_on for each in every)
        if every and (self.schedulers.paused or not are_on):
            raise InvalidRequest("the engine is paused: resume it first")

    # ---- observation

    def __iter__(self) -> Iterator[EngineWorker]:
        return iter([*self._workers, *(each for each in self._joining if each.joining)])

    def reports(self) -> list[WorkerReport]:
        """Return the state of each worker, with those that are being added."""
        return [each.report() for each in self]

    @property
    def life(self) -> WorkerLife:
        """The state of the first worker that doesn't run, or of the first one if all do.

        Workers that were given up count only if there are no others.
        """
        every = [each.supervisor.life for each in self._workers]
        lives = [life for life in every if life.state != "ended"] or every
        return next((life for life in lives if life.state != "running"), lives[0])

    @property
    def num_restarts(self) -> int:
        """Number of workers replaced since the start."""
        return self._num_restarts + sum(each.supervisor.restarts for each in self._workers)
