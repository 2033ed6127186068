"""The run of one scenario: the real engine, fake workers with faults, and checking clients."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import trio

from trioserve.engine.engine import Engine
from trioserve.protocol.errors import EngineError, RequestAborted, TrioserveError, WorkerLost
from trioserve.requests.generation import GenerationStream
from trioserve.requests.request import Request
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.simulation.adapters import AdapterChecker
from trioserve.testing.simulation.cluster import ClusterChecker
from trioserve.testing.simulation.judge import RunState, Visit
from trioserve.testing.simulation.operators import Operators
from trioserve.testing.simulation.places import PlaceChecker
from trioserve.testing.simulation.scenario import Scenario, SimulatedClient
from trioserve.testing.simulation.sessions import SessionChecker
from trioserve.testing.simulation.sharing import SharingChecker
from trioserve.testing.simulation.trace import (
    Trace,
    Violation,
    as_violation,
    first_error,
    logs_into,
)
from trioserve.testing.simulation.turns import OrderChecker, Row
from trioserve.testing.simulation.watch import MessageChecker
from trioserve.testing.simulation.workers import SimulatedWorkers
from trioserve.testing.virtual import CancelAtCheckpoint

HORIZON = 10_000.0
"""Seconds after which a client that isn't done is stuck."""
SMALL_BUDGET = 1 << 20
"""Limit of unread output, in bytes. Below it, slow readers are ended to make room."""
SETTLING = 200.0
"""Seconds after the last client until everything has to be idle."""


class _LeftByError(Exception):
    """A client's own error."""


class World:
    """One scenario and everything that takes part in it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.trace = Trace()
        self.violation: Violation | None = None
        self.engine: Engine | None = None
        self.num_checkpoints = 0
        self.outcomes: dict[str, int] = {}
        self.adapters = AdapterChecker(self.trace, self._may_lose_workers)
        self.checkers = ClusterChecker(scenario, self._make_checker)
        self.workers = SimulatedWorkers(scenario, self.checkers)
        self.operators = Operators(scenario, self.trace, self.checkers, self.workers, self.check)
        self.run_state = RunState(scenario, self.checkers, self.adapters)
        self.visits = {each.number: Visit(each, self.run_state) for each in scenario.clients}
        self.sessions = SessionChecker()
        self.all_left = trio.Event()
        self.scope = trio.CancelScope()
        self.engine_scope = trio.CancelScope()

    def _make_checker(self, index: int, places: PlaceChecker) -> MessageChecker:
        """Return the checker of the messages of the worker of that index."""
        scenario = self.scenario
        return MessageChecker(
            index=index,
            label=f"worker {index}: " if scenario.is_cluster else "",
            trace=self.trace,
            depth=scenario.options["max_plans_in_flight"],
            num_stages=scenario.worker.num_stages,
            page_size=scenario.worker.page_size,
            is_over=lambda row: self.visits[row[0]].is_over(row[1]),
            adapter_is_gone=self.adapters.is_gone,
            on_fault=self.checkers.disturb,
            after_step=self.check,
            report=self.report,
            turns=OrderChecker.of(scenario, self._is_due),
            sharing=SharingChecker(
                page_size=scenario.worker.page_size,
                namespace_of=lambda client: (
                    self.visits[client].client.cache_salt,
                    self.adapters.key_of(client),
                ),
                enabled=scenario.options["enable_prefix_caching"],
            ),
            places=places,
        )

    def _may_lose_workers(self) -> bool:
        scenario = self.scenario
        away = any(pause.mode == "release" for pause in scenario.pauses) or scenario.changes
        return bool(away or scenario.faults) or scenario.is_poisoned

    def _is_due(self, row: Row, num_tokens: int) -> bool:
        client, index = row
        visit = self.visits[client]
        # An output's error ends all outputs of its request.
        may_fail = any(each.finish_reason == "error" for each in visit.expected)
        unfinished = num_tokens < len(visit.expected[index].token_ids)
        # A preempted sequence with a grammar waits until the worker has compiled it again.
        has_grammar = visit.client.params.get("grammar") is not None
        # An output that is ended to make room stops at once; its end is delivered later.
        budget = self.scenario.options.get("max_total_stream_bytes", SMALL_BUDGET)
        may_be_evicted = budget < SMALL_BUDGET and visit.client.pause > 0
        is_over = self.run_state.ended or may_fail or may_be_evicted or visit.is_over(index)
        return unfinished and not has_grammar and not is_over

    # ---- invariants

    def report(self, error: Exception) -> None:
        """Record the first violation, and end the run."""
        if self.violation is None:
            self.violation = as_violation(error)
            self.trace.note(f"VIOLATION {self.violation}")
            self.scope.cancel()

    def check(self) -> None:
        """Check the engine's own invariants, after each step."""
        if self.engine is not None:
            self.engine.check_integrity()

    def check_idle(self) -> None:
        """Check the engine when no task can run and time is about to jump."""
        if self.engine is None or self.violation is not None:
            return
        try:
            self.check()
            self.workers.check_places()
            self._check_not_stalled(self.engine)
        except Exception as error:
            self.report(error)

    def _check_not_stalled(self, engine: Engine) -> None:
        now = engine.statistics()
        operators = self.operators
        if not engine.healthy or operators.pausing.locked() or operators.num_changing:
            return
        if self.scenario.worker.link_delay:
            return
        for index, worker in self.workers.current.items():
            checker = self.checkers.of(index)
            if checker.num_unanswered or checker.is_calling("load_adapter", "unload_adapter"):
                continue
            counts = self.workers.made[index].scheduler.statistics()
            busy = counts.num_running + counts.num_waiting
            if checker.is_calling("prepare"):
                busy -= sum(visit.num_waiting_for_grammar for visit in self.visits.values())
            if busy > 0 and not self.workers.is_transferring(index):
                raise Violation(
                    "outputs that can be computed are computed", f"{busy} outputs, no plan"
                )
            if not now.num_streams and worker.slots and not self.scenario.is_far(index):
                detail = f"{worker.slots}"
                raise Violation("the worker is told of each slot that closes", detail)

    # ---- the run

    async def run(self) -> None:
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        try:
            with self.scope, logs_into(self.trace):
                with trio.move_on_after(HORIZON) as horizon:
                    await self._run_all()
                if horizon.cancelled_caught:
                    raise Violation("everything comes to an end", self._open_clients())
        except Exception as error:
            self.report(error)
        tasks_after = trio.lowlevel.current_statistics().tasks_living
        if self.violation is None and tasks_after != tasks_before:
            self.report(Violation("no task is left", f"{tasks_after - tasks_before} more"))

    def _open_clients(self) -> str:
        return f"clients {[n for n, visit in self.visits.items() if not visit.left]}"

    async def _run_all(self) -> None:
        try:
            # Clients are outside: they outlive the engine and see its end.
            async with trio.open_nursery() as clients:
                await self._run_engine(clients)
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _run_engine(self, clients: trio.Nursery) -> None:
        try:
            with self.engine_scope:
                async with (
                    open_fake_engine(
                        worker_maker=self.workers.maker,
                        eos_token_ids=self.scenario.eos_token_ids,
                        **self.scenario.options,
                    ) as self.engine,
                    trio.open_nursery() as nursery,
                ):
                    self.engine.on_request_end = self._request_ended
                    for client in self.scenario.clients:
                        clients.start_soon(self._reported, self._visit, self.engine, client)
                    for change in self.scenario.adapters:
                        nursery.start_soon(
                            self._reported, self.adapters.change, self.engine, change
                        )
                    for worker_change in self.scenario.changes:
                        nursery.start_soon(
                            self._reported, self.operators.change, self.engine, worker_change
                        )
                    for pause in self.scenario.pauses:
                        clients.start_soon(self._reported, self.operators.pause, self.engine, pause)
                    if self.scenario.ends != "idle":
                        clients.start_soon(self._end, self.engine)
                    await self._wait_until_done(self.engine)
                    nursery.cancel_scope.cancel()
        except (EngineError, WorkerLost) as error:
            self._check_failure(error)

    async def _wait_until_done(self, engine: Engine) -> None:
        """Wait until all clients have left, and everything is idle."""
        await self.all_left.wait()
        self.sessions.close()
        await trio.sleep(SETTLING)
        await self._unload_all(engine)
        now = engine.statistics()
        idle = attrs.asdict(now.scheduler)
        held = {name: idle[name] for name in ("num_running", "num_waiting", "plans_in_flight")}
        held |= {"pages_held": now.scheduler.pages_held, "streams": now.num_streams}
        held |= {"bytes": now.stream_bytes, "tokenizing": now.num_tokenizing}
        held |= {"pins": len(engine.schedulers.pins.names())}
        held |= {"slots": sum(len(each.slots) for each in self.workers.current.values())}
        if any(held.values()):
            raise Violation("nothing is held when nothing runs", str(held))
        ends = sum(visit.num_request_ends for visit in self.visits.values())
        counted = sum(engine.metrics.request_n.counts) + engine.metrics.num_rejected
        if counted != ends:
            raise Violation("each request is counted once", f"{counted}, not {ends}")
        if self.operators.num_changing:
            raise Violation("adding and removing workers comes to an end")
        self.operators.check_weights()
        self.checkers.check_poison()
        engine.check_integrity()

    async def _unload_all(self, engine: Engine) -> None:
        """Unload all adapters, and check that no worker has any."""
        if not self.scenario.adapters:
            return
        if self.adapters.num_open:
            raise Violation("loading and unloading come to an end", f"{self.adapters.num_open}")
        await self.adapters.unload_all(engine)
        await trio.sleep(SETTLING)
        held = [each.adapters for each in self.workers.current.values() if each.adapters]
        if held or engine.adapters:
            raise Violation("no adapter is left", f"{held}, {engine.adapters}")

    def _check_failure(self, error: Exception) -> None:
        """Check that the engine failed because of too many worker deaths."""
        self.trace.note(f"the engine failed: {error}")
        limit = self.scenario.options["max_worker_restarts"]
        if not self.run_state.failed:
            raise Violation(
                "the engine fails only for too many deaths",
                f"{error!r} after {[each.deaths_without_progress for each in self.checkers]} "
                f"of {limit}",
            ) from error

    async def _end(self, engine: Engine) -> None:
        await trio.sleep(self.scenario.ends_at)
        self.trace.note(f"the end: {self.scenario.ends}")
        self.run_state.ended = True
        if self.scenario.ends == "cancel":
            self.engine_scope.cancel()
            return
        engine.drain()
        if self.scenario.ends == "abort":
            engine.abort_all(RequestAborted("the end"))

    # ---- clients

    def _request_ended(self, request: Request) -> None:
        visit = self.visits[int(request.id)]
        visit.num_request_ends += 1
        states = [(each.state.value, each.delivered) for each in request.sequences]
        if visit.num_request_ends > 1 or any(each != ("finished", True) for each in states):
            self.report(Violation("a request ends once", f"client {request.id}: {states}"))

    async def _reported(self, visit: Callable[..., Awaitable[None]], *args: Any) -> None:
        try:
            await visit(*args)
        except Exception as error:
            self.report(error)

    async def _visit(self, engine: Engine, client: SimulatedClient) -> None:
        visit = self.visits[client.number]
        await trio.sleep(client.arrives)
        if client.adapter:
            await self.adapters.wait_for(client.adapter)
        outcome = "left"
        try:
            with self._departure(client):
                outcome = await self._use(engine, visit)
        except _LeftByError:
            outcome = "left by error"
        except TrioserveError as error:
            outcome = type(error).__name__
            visit.left = True
            self.trace.note(f"client {client.number}: {error!r}")
            visit.check_error(error, trio.current_time())
        visit.left = True
        self.trace.note(f"client {client.number}: {outcome}")
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        visit.check_left_in_time(trio.current_time())
        visit.check_ends(outcome)
        self.check()
        if all(visit.left for visit in self.visits.values()):
            self.all_left.set()

    @contextlib.contextmanager
    def _departure(self, client: SimulatedClient) -> Iterator[None]:
        leaves = client.leaves
        if leaves is None or leaves.how in ("chunks", "error"):
            yield
        elif leaves.how == "time":
            with trio.move_on_after(leaves.at):
                yield
        else:
            number = int(leaves.at) or None
            counter = CancelAtCheckpoint(number, when_woken=leaves.when_woken)
            trio.lowlevel.add_instrument(counter)
            try:
                with counter.watch():
                    yield
            finally:
                trio.lowlevel.remove_instrument(counter)
                self.num_checkpoints = counter.count

    async def _use(self, engine: Engine, visit: Visit) -> str:
        """Send the request and read its output; return how it ended."""
        client = visit.client
        generation = self._generation(engine, visit)
        visit.entered_at = trio.current_time()
        self.trace.note(f"client {client.number} comes")
        try:
            async with generation as stream:
                if self._leaves_now(visit):
                    return "left"
                async for chunk in stream:
                    self.trace.note(f"client {client.number} gets {chunk}")
                    visit.take(chunk)
                    if client.session is not None:
                        self.sessions.note_chunk(visit, client.session)
                    if self._leaves_now(visit):
                        return "left"
                    await trio.sleep(client.pause)
                visit.check_whole(stream)
                # A second read gives the same end.
                with contextlib.suppress(trio.EndOfChannel):
                    visit.take(await stream.receive())
                return "whole"
        finally:
            visit.left = True
            if client.session is not None:
                self.sessions.end(visit, client.session)

    def _generation(
        self, engine: Engine, visit: Visit
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        client = visit.client
        options = {
            "request_id": str(client.number),
            "priority": client.priority,
            "cache_salt": client.cache_salt,
            "tenant": client.tenant,
            "retention": client.retention,
            "timeout": client.timeout,
            **client.params,
        }
        if client.adapter:
            visit.expect_adapter(self.adapters.begin(client.number, client.adapter))
        if client.session is None:
            return engine.generate(client.prompt, adapter=client.adapter, **options)
        return self.sessions.begin(engine, visit, client.session, **options)

    def _leaves_now(self, visit: Visit) -> bool:
        leaves = visit.client.leaves
        if leaves is None or leaves.how not in ("chunks", "error") or visit.num_chunks < leaves.at:
            return False
        if leaves.how == "error":
            raise _LeftByError
        return True
