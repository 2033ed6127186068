"""The scheduler's task: between the requests, one worker at a time, and the detokenizer.

What is decided is decided in :mod:`trioserve.scheduler.core`, which knows no task. Here are three
loops around it: :meth:`Scheduler.run` takes requests in, and for the worker that is attached one
loop sends plans while another receives results.

Reading order: ``limits``, ``policy`` (the choices), ``core`` (the state machine), ``computation``
(one sequence) and ``counts`` (how far all of them are), ``waiting`` (the queue, in which tenants
take turns), ``groups`` (several of one request), ``memory`` with ``slots``, ``pages``,
``host_pages`` and ``prefix`` (what sequences hold), ``priorities`` with ``pins`` and ``idle`` (what
cached pages are worth), ``draft``, ``results`` and ``intake`` (a plan on its way out and back),
``calls`` (what the worker is asked for besides plans), ``residency`` with ``adapters`` (which
adapters the worker holds), ``pause_gate`` with ``pause_control`` (when nobody is to be computed)
and ``weights`` (by which weights), ``recovery`` with ``fault_isolation`` (when something fails),
``watchdog`` (when a worker counts as hung), ``feeds`` with ``iterations`` (what whoever listens is
told), ``integrity`` (what is always true).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import trio

from trioserve._util.conditions import Conditions
from trioserve._util.exception_groups import sole_exception
from trioserve.config import EngineConfig
from trioserve.observability.logs import get_logger
from trioserve.observability.scheduler_statistics import Observer, SchedulerStatistics
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest, RequestAborted, WorkerLost
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.scheduler.adapters import HeldAdapters
from trioserve.scheduler.calls import Calls
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.grammar_recompiling import recompile
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.pause_control import PauseControl
from trioserve.scheduler.prefix_pins import PrefixPins
from trioserve.scheduler.watchdog import Watchdog
from trioserve.scheduler.weights import Weights
from trioserve.workers import Link
from trioserve.workers.power import WorkerPower

_log = get_logger("trioserve.scheduler")

SECOND_LOOK = 1.0
"""Seconds to hear of a step that came while this process was stopped itself."""


class Scheduler:
    """Owns every admitted request until it has finished, whatever becomes of the workers.

    Args:
        config: scheduling options; the other limits are the attached worker's.
        observer: is told of every step and token.
    """

    def __init__(self, config: EngineConfig, observer: Observer | None = None) -> None:
        self._config = config
        self._observer = observer
        self._core: SchedulerCore | None = None
        """None until the first worker has said what it can hold."""
        self.feeds = Feeds()
        """What is told to whoever listens: each step."""
        self._outputs: trio.MemorySendChannel[list[SequenceOutput]] | None = None
        self._worker_there = trio.Event()
        """Set while a worker is attached."""
        self._num_attached = 0
        self._attached_at = math.inf
        """When the last worker was attached; infinity once its loss has been judged."""
        self._work = trio.Event()
        """There may be something to send."""
        self._outbox: deque[wire.Message] = deque()
        """Goes out before the next plan."""
        self._is_stuck = False
        self._planned = Conditions()
        """What may have happened whenever a plan is made, or is found to have nothing in it."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called whenever the last plan has come back and nobody is left to be computed."""
        self._num_steps_idle = 0
        """Steps that were done when it was called last."""
        self._calls = Calls(self._send_first, self._owed)
        self._watchdog = Watchdog(config.watchdog_timeout)
        self.pause_control = PauseControl(self._existing_core, self._wake)
        self.pins = PrefixPins(lambda: self._core)
        self.weights = Weights(self.call, self.pause_control)
        self.worker_power = WorkerPower()
        """Sends the worker away, for whoever supervises workers with it."""
        self.adapters = HeldAdapters(
            self._existing_core, self._calls.call, self._wake, self._deliver
        )
        self._accusation = ""
        """Why the worker counts as hung, once it does."""
        self._overdue = trio.CancelScope()
        """Ends when the worker counts as hung."""

    # ---- requests

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        outputs: trio.MemorySendChannel[list[SequenceOutput]],
    ) -> None:
        """The task: take requests in until ``requests`` is closed.

        Args:
            requests: tokenized. They wait there until the first worker is attached; one that has
                finished meanwhile is dropped.
            outputs: what steps and aborts give, to the detokenizer. Its buffer has to be unbounded,
                because an abort can't wait.
        """
        self._outputs = outputs
        await self._worker_there.wait()
        async for request in requests:
            self._admit(request)
            # Requests that came together are admitted together, so that they share a plan.
            with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    self._admit(requests.receive_nowait())

    def _admit(self, request: Request) -> None:
        assert self._core is not None
        if all(sequence.state is State.FINISHED for sequence in request.sequences):
            return
        try:
            self._core.submit(request, trio.current_time())
        except InvalidRequest as error:
            request.reject(error)
            return
        request.admit()
        self._work.set()

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent.

        What the worker holds of it is closed by the next plan. A request that nobody has admitted
        yet is rejected.
        """
        if sequence.state is State.FINISHED:
            return
        if sequence.state in (State.CREATED, State.TOKENIZING):
            sequence.finish = finish
            sequence.move_to(State.FINISHED)
            output: SequenceOutput | None = SequenceOutput(sequence, finish=finish)
            if all(sibling.state is State.FINISHED for sibling in sequence.request.sequences):
                sequence.request.reject(finish.error or RequestAborted("the request was aborted"))
        else:
            assert self._core is not None
            drop = self._core.drop(sequence)
            if drop is not None:
                self._outbox.append(drop)
            output = self._core.abort(sequence, finish)
        if output is not None:
            self._deliver([output])
        self._wake()
        self._look()

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        if not outputs or self._outputs is None:
            return
        try:
            self._outputs.send_nowait(outputs)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # The engine is closing and nobody delivers any more: it ends the streams itself.
            return

    # ---- a worker

    async def attach(self, link: Link, ready: wire.Ready) -> None:
        """Serve one worker until it is lost. Requests outlive it, and resume with the next one.

        Raises:
            WorkerLost: the worker is gone, can't go on, or spoke nonsense.
        """
        limits = SchedulerLimits.of(self._config, ready)
        if self._core is None:
            self._core = SchedulerCore(limits, self._observer, self.feeds)
        else:
            self._deliver(self._core.recovery.restart(limits))
            self._look()
        self._accusation = ""
        self._num_attached += 1
        self._attached_at = trio.current_time()
        self._worker_there.set()
        self._work.set()
        # Taken before either loop runs: which of them runs first is chance.
        first_plan = self._core.next_number
        recompiling = functools.partial(
            recompile,
            self._core,
            self._calls.call,
            conditions=self._planned,
            wake=self._wake,
            deliver=self._deliver,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, link, self._core)
                nursery.start_soon(self._receive, link, self._core, first_plan)
                nursery.start_soon(self._watch)
                nursery.start_soon(self.adapters.serve)
                nursery.start_soon(recompiling)
        except BaseExceptionGroup as group:
            error = sole_exception(group)
        finally:
            self._worker_there = trio.Event()
            self._core.now = trio.current_time()
            self._core.recovery.on_worker_lost()
            self._is_stuck = False
            self._watchdog.settle_all(trio.current_time())
            self._outbox.clear()
            self._calls.on_worker_lost(self._accusation, sent_away=not self.worker_power.is_on)
            self.adapters.on_worker_lost(self._accusation)
            self._look()
        raise error

    def judge(self, loss: WorkerLost) -> int:
        """Why the worker was lost that was attached, or the one that was to be next.

        The request that is to blame, if one is found to be, ends with an error.

        Returns:
            how many were lost, this one included, since there was progress: a step, or fewer
            requests that may be to blame.
        """
        if self._core is None:
            return 1
        outputs, num_deaths = self._core.recovery.judge(
            loss, trio.current_time() - self._attached_at
        )
        self._attached_at = math.inf
        self._end(outputs, str(loss))
        return num_deaths

    def _end(self, outputs: list[SequenceOutput], reason: str) -> None:
        """Deliver the end of who is to blame, and log who is, or who may be."""
        for request in dict.fromkeys(output.sequence.request for output in outputs):
            _log.error("request blamed", request_id=request.id, reason=reason)
        self._deliver(outputs)
        self._look()
        assert self._core is not None
        fault_isolation = self._core.recovery.fault_isolation
        if fault_isolation.restricts:
            _log.warning(
                "requests suspected",
                number=len(fault_isolation.suspects),
                probation=len(fault_isolation.probation),
            )

    @trio.lowlevel.enable_ki_protection
    async def _send(self, link: Link, core: SchedulerCore) -> None:
        """Send whatever is to be sent, as soon as it is."""
        while True:
            message: wire.Message | None
            if self._outbox:
                message = self._outbox.popleft()
            else:
                message = core.next_plan(trio.current_time())
                self._follow(core)
                self.adapters.notify()
                self._planned.notify()
            if message is None:
                self._look_around(core)
                self._work = trio.Event()
                await self._work.wait()
                continue
            self._is_stuck = False
            try:
                await link.send(message)
            except WorkerLost:
                # The receiver notices too, once it has taken all that the worker still said.
                return

    def _look_around(self, core: SchedulerCore) -> None:
        """There is nothing to send: is that because nobody wants anything?"""
        was_stuck = self._is_stuck
        self._is_stuck = (
            not core.in_flight
            and core.num_unfinished > 0
            and core.pause_gate.is_open
            and not core.residency.wants_change
            and not core.uncompiled
        )
        if self._is_stuck and not was_stuck:
            _log.error(
                "stuck: no plan is made for anybody, and none is in flight",
                running=len(core.running),
                waiting=core.num_waiting,
            )
        num_steps = core.counters.num_steps
        if self.idle and num_steps > self._num_steps_idle:
            self._num_steps_idle = num_steps
            self.on_idle()

    @trio.lowlevel.enable_ki_protection
    async def _receive(self, link: Link, core: SchedulerCore, first_valid: int) -> None:
        """Take whatever the worker says.

        After a failure it refuses the plans that were on their way: failures of plans before
        ``first_valid``, which is where it counts on from, are old news.
        """
        while True:
            message = await link.receive()
            match message:
                case wire.StepResult():
                    now = trio.current_time()
                    self._deliver(core.on_result(message, now))
                    self._watchdog.learn(now)
                case wire.Failure() if message.fatal or message.number >= first_valid:
                    self._end(core.recovery.on_failure(message), message.message)
                    first_valid = core.next_number
                    self._outbox.append(wire.Reset(next_plan=first_valid))
                case wire.Reply():
                    self._calls.answer(message)
                case wire.Failure():
                    pass
                case _:
                    raise WorkerLost(f"the worker sent {type(message).__name__} while serving")
            self._follow(core)
            self._wake()
            self._look()

    async def _watch(self) -> None:
        """Wait until the worker counts as hung."""
        while not self._accusation:
            with trio.CancelScope(deadline=self._watchdog.deadline) as self._overdue:
                await trio.sleep_forever()
            if self._accusation or self._watchdog.forgive(trio.current_time()):
                continue
            # If it is this process that was stopped, what the worker said meanwhile comes first.
            await trio.sleep(SECOND_LOOK)
            if not self._accusation and trio.current_time() >= self._watchdog.deadline:
                self._accusation = self._watchdog.accusation()
        raise WorkerLost(self._accusation, reason="hung")

    def _follow(self, core: SchedulerCore) -> None:
        """Plans may have come or gone: move the watchdog's deadline."""
        self._watchdog.follow(core.in_flight[0] if core.in_flight else None, trio.current_time())
        self._overdue.deadline = self._watchdog.deadline

    def _look(self) -> None:
        """Something has happened that somebody may wait for."""
        self.pause_control.notify()
        self.adapters.notify()

    def _wake(self) -> None:
        """There may be something to send."""
        self._work.set()

    def _existing_core(self) -> SchedulerCore:
        assert self._core is not None, "no worker has been attached yet"
        return self._core

    # ---- calls

    async def call(self, name: str, arguments: object = None, *, num_bytes: int = 0) -> Any:
        """Have the worker do something rare and slow, by name.

        One that doesn't answer in time counts as hung; how long it may take is the watchdog's
        business, or else the caller's.

        Args:
            name: what the worker knows it by.
            arguments: whatever it takes, of MessagePack's types.
            num_bytes: how much it is about, where that is what it takes its time for.

        Raises:
            EngineError: the worker says why it can't.
            WorkerLost: there is no worker, or it was lost before it answered; it may have hung.
        """
        if not self.attached:
            raise WorkerLost(f"there is no worker to call {name!r}")
        return await self._calls.call(name, arguments, num_bytes=num_bytes)

    def report_fault(self, reason: str) -> None:
        """The worker that is attached counts as hung, and is replaced."""
        self._accusation = reason
        self._overdue.cancel()

    def _send_first(self, message: wire.Message) -> None:
        """Send ``message`` before the next plan."""
        self._outbox.append(message)
        self._work.set()

    @contextlib.contextmanager
    def _owed(self, name: str, num_bytes: int) -> Iterator[None]:
        """The worker owes the answer to a call, which it is sent before the next plan."""
        before_plan = self._existing_core().next_number
        reply = self._watchdog.expect(name, num_bytes, before_plan, trio.current_time())
        self._overdue.deadline = self._watchdog.deadline
        try:
            yield
        finally:
            self._watchdog.settle(reply, trio.current_time())
            self._overdue.deadline = self._watchdog.deadline

    # ---- what can be seen from outside

    @property
    def core(self) -> SchedulerCore | None:
        """What decides, to be looked at; None before the first worker."""
        return self._core

    @property
    def attached(self) -> bool:
        """Whether a worker is there."""
        return self._worker_there.is_set()

    @property
    def paused(self) -> bool:
        """Whether nobody is to be computed."""
        return self._core is not None and self._core.pause_gate.is_closed

    @property
    def num_attached(self) -> int:
        """Workers that have been attached since the start, the present one included."""
        return self._num_attached

    async def wait_attached(self) -> None:
        """Wait until a worker is there."""
        while not self.attached:
            await self._worker_there.wait()

    @property
    def num_steps(self) -> int:
        """Steps completed, by whatever worker: it grows while there is progress."""
        return 0 if self._core is None else self._core.counters.num_steps

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return 0 if self._core is None else self._core.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens, prompt and output so far."""
        return 0 if self._core is None else self._core.num_waiting_tokens

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return how many sequences of ``tenant`` wait for a slot, and their tokens."""
        return (0, 0) if self._core is None else self._core.waiting_of_tenants.of(tenant)

    @property
    def stalled(self) -> bool:
        """Whether there is no progress, though there could be.

        A plan has been due for more than half of the time that the watchdog allows; or somebody is
        to be computed, and neither is a plan made for anybody nor is one in flight, which is a bug.
        """
        late = self._watchdog.is_late(trio.current_time())
        return self.attached and (late or self._is_stuck)

    @property
    def idle(self) -> bool:
        """Whether nobody is to be computed, and no plan is in flight."""
        core = self._core
        return core is None or (not core.in_flight and core.num_unfinished == 0)

    def statistics(self) -> SchedulerStatistics:
        """Counts of this moment; all 0 before the first worker."""
        if self._core is None:
            return SchedulerStatistics()
        return self.adapters.named_in(self._core.statistics())

    def check_integrity(self) -> None:
        """Assert the invariants that :mod:`trioserve.scheduler.invariants` lists."""
        if self._core is not None:
            self._core.check_integrity()
