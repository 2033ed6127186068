"""The fake workers of a scenario, with their faults. Each index has one after the other."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.config import EngineConfig
from trioserve.engine.engine_worker import EngineWorker, MakeWorker
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.requests.request import Request
from trioserve.testing.fake_disk import FakeDisk
from trioserve.testing.fake_engine import run_fake_worker
from trioserve.testing.fake_faults import StepFails, WorkerDies
from trioserve.testing.fake_worker import FakeWorker
from trioserve.testing.simulation.cluster import ClusterChecker
from trioserve.testing.simulation.draw import REFUSED_GRAMMAR
from trioserve.testing.simulation.network import NetworkLink
from trioserve.testing.simulation.scenario import Fault, Scenario, client_of, num_accepted
from trioserve.testing.simulation.trace import Violation
from trioserve.testing.simulation.watch import CheckedLink, MessageChecker
from trioserve.workers import Link

HANG_SECONDS = 1e6
"""Seconds of a step that hangs."""


@attrs.define(eq=False)
class SimulatedWorkers:
    """The workers of one scenario."""

    _scenario: Scenario
    _checkers: ClusterChecker
    current: dict[int, FakeWorker] = attrs.field(init=False, factory=dict)
    """The present fake workers, by index."""
    made: dict[int, EngineWorker] = attrs.field(init=False, factory=dict)
    """The engine's sides of all workers there were, by index."""
    _disk: FakeDisk = attrs.field(init=False)
    """Disk that all workers share."""
    _num_opened: collections.Counter[int] = attrs.field(init=False, factory=collections.Counter)

    def __attrs_post_init__(self) -> None:
        self._disk = FakeDisk(max_pages=self._scenario.worker.disk_pages)

    def maker(self, config: EngineConfig, metrics: Metrics) -> MakeWorker:
        """Return the function that makes the engine's side of a worker."""

        def make(index: int, device: str | None = None) -> EngineWorker:
            opened = functools.partial(self._open, index, config)
            made = self.made[index] = EngineWorker.of(index, config, metrics, opened)
            return made

        return make

    def check_places(self) -> None:
        """Check that each request is on one worker, and knows on which."""
        found: set[Request] = set()
        for index, made in self.made.items():
            core = made.scheduler.core
            for request in [] if core is None else core.unfinished_requests():
                if request in found or request.scheduler is not made.scheduler:
                    detail = f"client {request.id}, worker {index}"
                    raise Violation("a request is on one worker", detail)
                found.add(request)

    def is_transferring(self, index: int) -> bool:
        """Return True if a worker waits for pages that are on their way, or holds such pages."""
        core = self.made[index].scheduler.core
        if core is None:
            return False
        memory = core.memory
        is_fetching = memory.fetched is not None and memory.fetched.is_busy
        every = [self._checkers.of(each) for each in self.current]
        return (is_fetching or bool(memory.lending.held)) and any(
            each.is_calling("export_pages", "import_pages", "read_pages") for each in every
        )

    @contextlib.asynccontextmanager
    async def _open(
        self, index: int, config: EngineConfig
    ) -> AsyncIterator[tuple[Link, wire.Ready]]:
        """Run the next worker of an index, in place of the supervisor's worker process."""
        number = self._num_opened[index]
        self._num_opened[index] += 1
        name = f"worker {index}/{number}" if self._scenario.is_cluster else f"worker {number}"
        kind, checker = self._scenario.worker, self._checkers.of(index)
        faults = [
            each for each in self._scenario.faults if (each.index, each.worker) == (index, number)
        ]
        checker.trace.note(f"{name} starts")
        weights = self.made[index].scheduler.weights.path
        try:
            for fault in faults:
                if fault.what == "loading":
                    await trio.sleep(fault.at)
                    raise WorkerLost("it died while loading")
            await trio.sleep(kind.load_time)
            worker = self.current[index] = self._make_worker(index, number, name, faults)
            worker.weights = weights
            checker.worker_ready()
            killed = trio.Event()
            async with trio.open_nursery() as nursery:
                for fault in faults:
                    if fault.what == "killed":
                        nursery.start_soon(self._kill, checker, name, killed, fault.at)
                async with run_fake_worker(worker, config, killed=killed) as (link, ready):
                    checker.trace.note(f"{name} is ready")
                    if self._scenario.is_cluster:
                        of_link = [each for each in faults if each.is_of_link]
                        link = NetworkLink(link, self._scenario.member(index), of_link)
                        nursery.start_soon(link.run)
                    yield CheckedLink(link, checker, kind.link_delay), ready
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            error = sole_exception(group)
            if isinstance(error, WorkerLost):
                self._lost(checker, name, error)
            elif isinstance(error, AssertionError):
                checker.report(error)
            raise error from None
        except WorkerLost as error:
            self._lost(checker, name, error)
            raise
        finally:
            self.current.pop(index, None)

    def _lost(self, checker: MessageChecker, name: str, error: WorkerLost) -> None:
        checker.worker_lost()
        checker.trace.note(f"{name} is lost: {error}")

    async def _kill(
        self, checker: MessageChecker, name: str, killed: trio.Event, after: float
    ) -> None:
        await trio.sleep(after)
        checker.trace.note(f"{name} is killed")
        killed.set()

    def _make_worker(self, index: int, number: int, name: str, faults: list[Fault]) -> FakeWorker:
        kind = self._scenario.worker
        injector = _FaultInjector(self._scenario, self._checkers.of(index), name, index, faults)
        return FakeWorker(
            num_pages=kind.pages_of(number),
            num_host_pages=kind.num_host_pages,
            disk=self._disk,
            page_size=kind.page_size,
            max_model_len=kind.max_model_len,
            max_num_batched_tokens=kind.max_num_batched_tokens,
            token=kind.token_function(),
            computes_past_stop=kind.computes_past_stop,
            max_row_tokens=kind.max_row_tokens,
            num_stages=kind.num_stages,
            accepted=num_accepted,
            step_time=injector.step_time,
            script=injector.script,
            calls={"prepare": _prepare},
            call_time=kind.call_time,
            max_loras=self._scenario.options.get("max_loras", 1),
            max_cpu_loras=self._scenario.options.get("max_cpu_loras", 1),
        )


def _prepare(arguments: Any) -> Any:
    refused = arguments["grammar"][1] == REFUSED_GRAMMAR
    return {"error": "no such grammar", "param": "grammar"} if refused else None


class _FaultInjector:
    """The faults in the steps of one worker."""

    def __init__(
        self,
        scenario: Scenario,
        checker: MessageChecker,
        name: str,
        index: int,
        faults: list[Fault],
    ) -> None:
        self._kind = scenario.worker
        self._slowness = scenario.member(index).slowness
        self._checker = checker
        self._name = name
        self._at_step = {int(fault.at): fault for fault in faults if fault.is_at_step}
        self._poison = {client.number for client in scenario.clients if client.poisonous}
        self._clients: dict[int, int] = {}
        """Clients by slot."""
        self._slow: dict[int, float] = {}
        """Additional seconds by plan."""

    def script(self, step: int, plan: wire.Plan) -> None:
        """Inject the fault of step ``step``, if it has one: see ``FakeWorker.script``."""
        self._clients.update({each.slot: client_of(each.sampler) for each in plan.opened})
        slots = wire.ints(plan.row_slots).tolist()
        if any(self._clients[slot] in self._poison for slot in slots):
            self._checker.num_poisoned += 1
            raise WorkerDies
        fault = self._at_step.pop(step, None)
        if fault is None:
            return
        self._checker.trace.note(f"{self._name}, plan {plan.number}: {fault.what}")
        match fault.what:
            case "dies":
                raise WorkerDies
            case "hangs":
                self._slow[plan.number] = HANG_SECONDS
            case "pauses":
                self._slow[plan.number] = fault.seconds
            case "fails_in_row" if slots:
                raise StepFails("injected failure", slot=slots[len(slots) // 2])
            case _:
                raise StepFails("injected failure", fatal=fault.what == "fatal")

    def step_time(self, plan: wire.Plan) -> float:
        """Return the duration of a step, in seconds."""
        num_tokens = int(wire.ints(plan.row_counts).sum())
        usual = self._kind.step_time + num_tokens * self._kind.seconds_per_token
        return usual * self._slowness + self._slow.get(plan.number, 0.0)
