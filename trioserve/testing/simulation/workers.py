"""The fake workers of a scenario, one after the other, with their faults."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.config import EngineConfig
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.testing.fake_engine import run_fake_worker
from trioserve.testing.fake_faults import StepFails, WorkerDies
from trioserve.testing.fake_worker import FakeWorker
from trioserve.testing.simulation.draw import REFUSED_GRAMMAR
from trioserve.testing.simulation.scenario import Fault, Scenario, client_of, num_accepted
from trioserve.testing.simulation.watch import CheckedLink, MessageChecker
from trioserve.workers import Link

HANG_SECONDS = 1e6
"""Seconds of a step that hangs."""


@attrs.define(eq=False)
class SimulatedWorkers:
    """The workers of one scenario."""

    _scenario: Scenario
    _checker: MessageChecker
    current: FakeWorker | None = attrs.field(init=False, default=None)
    """The present worker."""
    _num_opened: int = attrs.field(init=False, default=0)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Link, wire.Ready]]:
        """Run the next worker for the block, in place of the supervisor's worker process."""
        number = self._num_opened
        self._num_opened += 1
        kind = self._scenario.worker
        faults = [fault for fault in self._scenario.faults if fault.worker == number]
        self._checker.trace.note(f"worker {number} starts")
        try:
            for fault in faults:
                if fault.what == "loading":
                    await trio.sleep(fault.at)
                    raise WorkerLost("it died while loading")
            await trio.sleep(kind.load_time)
            self.current = self._make_worker(number, faults)
            self._checker.worker_ready()
            config = EngineConfig("fake", **self._scenario.options)
            killed = trio.Event()
            async with trio.open_nursery() as nursery:
                for fault in faults:
                    if fault.what == "killed":
                        nursery.start_soon(self._kill, killed, fault.at)
                async with run_fake_worker(self.current, config, killed=killed) as (link, ready):
                    self._checker.trace.note(f"worker {number} is ready")
                    yield CheckedLink(link, self._checker, kind.link_delay), ready
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            error = sole_exception(group)
            if isinstance(error, WorkerLost):
                self._lost(number, error)
            elif isinstance(error, AssertionError):
                self._checker.report(error)
            raise error from None
        except WorkerLost as error:
            self._lost(number, error)
            raise
        finally:
            self.current = None

    def _lost(self, number: int, error: WorkerLost) -> None:
        self._checker.worker_lost()
        self._checker.trace.note(f"worker {number} is lost: {error}")

    async def _kill(self, killed: trio.Event, after: float) -> None:
        await trio.sleep(after)
        self._checker.trace.note("the worker is killed")
        killed.set()

    def _make_worker(self, number: int, faults: list[Fault]) -> FakeWorker:
        kind = self._scenario.worker
        injector = _FaultInjector(self._scenario, self._checker, number, faults)
        return FakeWorker(
            num_pages=kind.pages_of(number),
            num_host_pages=kind.num_host_pages,
            page_size=kind.page_size,
            max_model_len=kind.max_model_len,
            max_num_batched_tokens=kind.max_num_batched_tokens,
            token=kind.token_function(),
            computes_past_stop=kind.computes_past_stop,
            max_row_tokens=kind.max_row_tokens,
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
        self, scenario: Scenario, checker: MessageChecker, number: int, faults: list[Fault]
    ) -> None:
        self._kind = scenario.worker
        self._checker = checker
        self._number = number
        self._at_step = {
            int(fault.at): fault for fault in faults if fault.what not in ("killed", "loading")
        }
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
            raise WorkerDies
        fault = self._at_step.pop(step, None)
        if fault is None:
            return
        self._checker.trace.note(f"worker {self._number}, plan {plan.number}: {fault.what}")
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
        return usual + self._slow.get(plan.number, 0.0)
