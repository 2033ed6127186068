"""The scheduler's task. It connects requests, one worker at a time, and the detokenizer.

All decisions are made in :mod:`trioserve.scheduler.core`, which has no task. Two loops surround it
while a worker is attached: one (:mod:`~trioserve.scheduler.plan_sender`) sends plans, the other
receives results. Requests come from :class:`~trioserve.engine.schedulers.Schedulers`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import trio

from trioserve._util.conditions import Conditions
from trioserve._util.exception_groups import sole_exception
from trioserve.config import EngineConfig
from trioserve.observability.logs import get_logger
from trioserve.observability.scheduler_statistics import Observer, SchedulerStatistics
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest, RequestAborted, WorkerLost, WorkerSentAway
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.scheduler.adapters import AdapterManager
from trioserve.scheduler.beams import StopStringAtEnd
from trioserve.scheduler.calls import Calls
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.grammar_recompiling import recompile
from trioserve.scheduler.hang_detection import HangDetection
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.moving import Moving, take_in, take_out
from trioserve.scheduler.page_transfers import transfer_pages
from trioserve.scheduler.pause_control import PauseControl
from trioserve.scheduler.plan_sender import PlanSender
from trioserve.scheduler.watchdog import Watchdog
from trioserve.scheduler.weights import Weights
from trioserve.workers import Link
from trioserve.workers.power import WorkerPower

_log = get_logger("trioserve.scheduler")


class Scheduler:
    """The owner of every admitted request until it finishes; requests outlive workers.

    Args:
        config: Scheduling options; all other limits come from the attached worker.
        observer: Told of every step and token.
        index: Number of the worker.
    """

    def __init__(
        self, config: EngineConfig, observer: Observer | None = None, index: int = 0
    ) -> None:
        self.index = index
        """Number of its worker, which no other worker of the engine ever has."""
        self._config = config
        self._observer = observer
        self._core: SchedulerCore | None = None
        """None until the first worker has reported its capacity."""
        self.feeds = Feeds()
        """Event streams of steps and of the prefix cache."""
        self.stop_string_at_end: StopStringAtEnd | None = None
        """Finds the stop strings of beams; None if there is no text."""
        self.outputs: trio.MemorySendChannel[list[SequenceOutput]] | None = None
        """Channel of the outputs of steps and aborts; its buffer must be unbounded."""
        self._worker_attached = trio.Event()
        """Set while a worker is attached."""
        self._num_attached = 0
        self._attached_at = math.inf
        """Time when the last worker was attached; infinity once its loss has been judged."""
        self._planned = Conditions()
        """Conditions that may change with each plan, or when there is none to make."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called when the loss of the worker has been judged."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last plan has come back and no sequence is left."""
        self._num_steps_idle = 0
        """Number of completed steps at the last call of ``on_idle``."""
        self._sender = PlanSender(on_planned=self._note_plan, on_nothing_to_send=self._report_idle)
        self._watchdog = Watchdog(config.watchdog_timeout)
        self._hang_detection = HangDetection(self._watchdog, self._existing_core)
        self._calls = Calls(self._sender.send_first, self._hang_detection.expect_reply)
        self.pause_control = PauseControl(self._existing_core, self._sender.wake)
        self.weights = Weights(
            self.call, lambda: self.pause_control.flush_prefixes(for_other_weights=True)
        )
        self.worker_power = WorkerPower()
        """Switch by which the worker is put to sleep and woken."""
        self.adapters = AdapterManager(
            self._existing_core, self._calls.call, self._sender.wake, self._deliver
        )
        self.feeds.cache.adapter_name = self.adapters.name_of

    # ---- requests

    def submit(self, request: Request, *, compiles: bool = False) -> None:
        """Take in a tokenized request; a worker must have been attached. Never blocks.

        A request that has finished meanwhile is dropped.

        Args:
            request: The request.
            compiles: True if the worker may have to compile its grammar.
        """
        assert self._core is not None, "no worker has been attached yet"
        if all(sequence.state is State.FINISHED for sequence in request.sequences):
            return
        try:
            self._core.submit(request, trio.current_time(), self.stop_string_at_end)
        except InvalidRequest as error:
            request.reject(error)
            return
        grammar = request.sequences[0].sampler.grammar
        if grammar is not None:
            self.feeds.had_grammars.set()
        if compiles and grammar is not None:
            self._core.uncompiled[grammar] = None
            self._planned.notify()
        request.admit()
        self._sender.wake()

    def take_out(self, request: Request) -> Moving:
        """Take out a movable request (:mod:`~trioserve.scheduler.moving`)."""
        moving = take_out(self._existing_core(), request)
        self._notify()
        return moving

    def take_in(self, moving: Moving) -> None:
        """Take in a request that was taken out of another scheduler."""
        take_in(self._existing_core(), moving)
        self._planned.notify()
        self._sender.wake()
        self._notify()

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent.

        The next plan closes its slot on the worker. A request that has not been admitted yet is
        rejected.
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
                self._sender.send_first(drop)
            output = self._core.abort(sequence, finish)
        if output is not None:
            self._deliver([output])
        self._sender.wake()
        self._notify()

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        if not outputs or self.outputs is None:
            return
        try:
            self.outputs.send_nowait(outputs)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # The engine is closing and ends the streams itself.
            return

    # ---- a worker

    async def attach(self, link: Link, ready: wire.Ready) -> None:
        """Serve one worker until it is lost. Requests outlive it and resume with the next one.

        Raises:
            WorkerLost: The worker is gone, can't go on, or broke the protocol.
        """
        limits = SchedulerLimits.of(self._config, ready)
        if self._core is None:
            self._core = SchedulerCore(limits, self._observer, self.feeds)
        else:
            self._deliver(self._core.recovery.restart(limits))
            self._notify()
        self._hang_detection.reason = ""
        self._num_attached += 1
        self._attached_at = trio.current_time()
        self._worker_attached.set()
        self._sender.wake()
        # Read before either loop runs, because either may run first.
        first_plan = self._core.next_number
        served = (self._core, self._calls.call)
        signals: dict[str, Any] = {"conditions": self._planned, "wake": self._sender.wake}
        recompiling = functools.partial(recompile, *served, deliver=self._deliver, **signals)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sender.run, link, self._core)
                nursery.start_soon(self._receive, link, self._core, first_plan)
                nursery.start_soon(self._hang_detection.watch)
                nursery.start_soon(self.adapters.serve)
                nursery.start_soon(recompiling)
                nursery.start_soon(functools.partial(transfer_pages, *served, **signals))
        except BaseExceptionGroup as group:
            error = sole_exception(group)
        finally:
            self._worker_attached = trio.Event()
            self._core.now = trio.current_time()
            self._core.recovery.on_worker_lost()
            self._watchdog.settle_all(trio.current_time())
            self._sender.on_worker_lost()
            hang_reason = self._hang_detection.reason
            self._calls.on_worker_lost(hang_reason, sent_away=not self.worker_power.is_on)
            self.adapters.on_worker_lost(hang_reason)
            self._notify()
        raise error

    def judge(self, loss: WorkerLost) -> int:
        """Judge why the attached worker, or the one about to be attached, was lost.

        If a request is found to be the culprit, it ends with an error.

        Returns:
            The number of workers lost since there was progress, this one included. Progress is a
            step, or fewer suspects.
        """
        if self._core is None:
            return 1
        outputs, num_deaths = self._core.recovery.judge(
            loss, trio.current_time() - self._attached_at
        )
        self._attached_at = math.inf
        self._end(outputs, str(loss))
        self.on_loss()
        return num_deaths

    def _end(self, outputs: list[SequenceOutput], reason: str) -> None:
        """Deliver the end of the culprit, and log the culprit or the suspects."""
        for request in dict.fromkeys(output.sequence.request for output in outputs):
            _log.error("request blamed", request_id=request.id, reason=reason)
        self._deliver(outputs)
        self._notify()
        assert self._core is not None
        fault_isolation = self._core.fault_isolation
        if fault_isolation.restricts:
            _log.warning(
                "requests suspected",
                number=len(fault_isolation.suspects),
                probation=len(fault_isolation.probation),
            )

    def _note_plan(self) -> None:
        """Take note of a new plan, or that there is none to make."""
        self._hang_detection.follow()
        self.adapters.notify()
        self._planned.notify()

    def _report_idle(self) -> None:
        """Call ``on_idle`` if the scheduler is idle and has completed steps since the last call."""
        if self.idle and self.num_steps > self._num_steps_idle:
            self._num_steps_idle = self.num_steps
            self.on_idle()

    @trio.lowlevel.enable_ki_protection
    async def _receive(self, link: Link, core: SchedulerCore, first_valid: int) -> None:
        """Receive and handle the worker's messages.

        After a failure the worker refuses the plans that were on their way. So failures of plans
        before ``first_valid``, the first plan number after the reset, are ignored.
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
                    self._sender.send_first(wire.Reset(next_plan=first_valid))
                case wire.Reply():
                    self._calls.answer(message)
                case wire.Failure():
                    pass
                case _:
                    raise WorkerLost(f"the worker sent {type(message).__name__} while serving")
            self._hang_detection.follow()
            self._sender.wake()
            self._notify()

    def _notify(self) -> None:
        """Notify tasks that wait for a change of the state."""
        self.pause_control.notify()
        self.adapters.notify()

    def _existing_core(self) -> SchedulerCore:
        assert self._core is not None, "no worker has been attached yet"
        return self._core

    # ---- calls

    async def call(self, name: str, arguments: object = None, *, num_bytes: int = 0) -> Any:
        """Call a rare and slow operation of the worker, by name.

        A worker that doesn't answer in time counts as hung. The watchdog sets the time for calls
        that it knows; for others the caller does.

        Args:
            name: Name of the operation.
            arguments: Arguments of MessagePack's types.
            num_bytes: Amount of data, if the operation's time depends on it.

        Raises:
            EngineError: The worker reports why it can't.
            WorkerSentAway: The worker was sent away on request.
            WorkerLost: There is no worker, or it was lost or hung before it answered.
        """
        if not self.attached:
            kind = WorkerLost if self.worker_power.is_on else WorkerSentAway
            raise kind(f"there is no worker to call {name!r}")
        return await self._calls.call(name, arguments, num_bytes=num_bytes)

    def report_fault(self, reason: str) -> None:
        """Treat the attached worker as hung, so that it is replaced."""
        self._hang_detection.declare_hung(reason)

    # ---- observation

    @property
    def core(self) -> SchedulerCore | None:
        """State machine, for inspection; None before the first worker."""
        return self._core

    @property
    def attached(self) -> bool:
        """True while a worker is attached."""
        return self._worker_attached.is_set()

    @property
    def paused(self) -> bool:
        """True while a pause keeps all sequences from being computed."""
        return self._core is not None and self._core.pause_gate.is_closed

    @property
    def num_attached(self) -> int:
        """Number of workers attached since the start, the present one included."""
        return self._num_attached

    async def wait_attached(self) -> None:
        """Block until a worker is attached."""
        while not self.attached:
            await self._worker_attached.wait()

    @property
    def num_steps(self) -> int:
        """Number of completed steps over all workers; it grows while there is progress."""
        return 0 if self._core is None else self._core.counters.num_steps

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return 0 if self._core is None else self._core.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens, prompt and output so far, of the sequences that wait for a slot."""
        return 0 if self._core is None else self._core.num_waiting_tokens

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return the numbers of waiting sequences of ``tenant``, and of their tokens."""
        return (0, 0) if self._core is None else self._core.waiting_of_tenants.of(tenant)

    @property
    def stalled(self) -> bool:
        """True if there is no progress although there could be.

        Either a plan has been due for more than half of the watchdog's time, or sequences are left
        but no plan is in flight and none is made, which is a bug.
        """
        late = self._watchdog.is_late(trio.current_time())
        return self.attached and (late or self._sender.is_stuck)

    @property
    def idle(self) -> bool:
        """True if no sequence is left and no plan is in flight."""
        core = self._core
        return core is None or (not core.in_flight and core.num_unfinished == 0)

    def statistics(self) -> SchedulerStatistics:
        """Return the counts of this moment; all 0 before the first worker."""
        if self._core is None:
            return SchedulerStatistics()
        return self.adapters.named_in(self._core.statistics())

    def check_integrity(self) -> None:
        """Assert the invariants that :mod:`trioserve.scheduler.invariants` lists."""
        if self._core is not None:
            self._core.check_integrity()
