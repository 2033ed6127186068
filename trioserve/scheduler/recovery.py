"""What becomes of everybody when a plan fails or the worker is lost, and who is to blame for it.

All that the worker knew is gone then, and everybody is back in line with the tokens so far. It is
counted how often that happens without progress: a step that was completed is progress, and so is
that fewer requests are suspects than before (:mod:`~.fault_isolation`). Past the limit of failures
the worker is given up, past that of deaths, which is the supervisor's, the engine. A worker that
dies with nothing to do after a calm minute is as good as one that made a step: it may have been a
long time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.requests.request import Finish, FinishReason, Request, SequenceOutput, State
from trioserve.scheduler.fault_isolation import FaultIsolation, Flight, Verdict
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.memory import Memory
from trioserve.scheduler.plan_builder import InFlight

if TYPE_CHECKING:
    from trioserve.scheduler.core import SchedulerCore

MAX_FAILURES = 3
"""Failures of plans without progress that a worker is given up for."""
CALM_LIFE = 60.0
"""Seconds."""


@attrs.define(eq=False)
class Recovery:
    """The part of a :class:`~.core.SchedulerCore` that begins where things go wrong."""

    _core: SchedulerCore
    fault_isolation: FaultIsolation = attrs.field(init=False, factory=FaultIsolation)
    _flight: Flight = attrs.field(init=False, factory=dict)
    """Who was in flight when the worker was lost; nobody once that has been judged."""
    _num_failures: int = attrs.field(init=False, default=0)
    _num_deaths: int = attrs.field(init=False, default=0)
    _num_steps: int = attrs.field(init=False, default=0)
    """Steps that were done at the last death."""

    def on_step(self, plan: InFlight) -> None:
        """``plan`` has been computed, and its rows are counted."""
        self._num_failures = 0
        self.fault_isolation.on_step(plan.computations)

    def on_failure(self, failure: wire.Failure) -> list[SequenceOutput]:
        """A plan in flight failed: everybody resumes after a Reset, but who is to blame.

        To blame is the sequence that the worker names, or who turns out to be.
        The caller sends a Reset with the core's ``next_number`` before the next plan.

        Raises:
            WorkerLost: the worker can't go on, or fails again and again.
        """
        if failure.fatal:
            raise WorkerLost(f"plan {failure.number} failed: {failure.message}")
        plan = next((each for each in self._core.in_flight if each.number == failure.number), None)
        if plan is None:
            raise WorkerLost(f"plan {failure.number} failed and isn't in flight: {failure.message}")
        culprit: Request | None = None
        slots = plan.slots.tolist()
        if failure.slot in slots:
            sequence = plan.computations[slots.index(failure.slot)].sequence
            # If it has ended meanwhile, its siblings go on without it.
            culprit = None if sequence.state is State.FINISHED else sequence.request
        else:
            verdict = self.fault_isolation.on_death(_flight_of([plan]))
            culprit = verdict.culprit
            self._num_failures += not _is_progress(verdict)
            if self._num_failures == MAX_FAILURES:
                self._core.in_flight.clear()  # Who was in it is accused of it once.
                raise WorkerLost(f"plan {failure.number} failed: {failure.message}")
        outputs = self._end(culprit, failure.message)
        self._forget_worker()
        return outputs

    def on_worker_lost(self) -> None:
        """There is no worker any more: everybody waits, and makes no plans until a restart."""
        self._flight = _flight_of(self._core.in_flight)
        self._forget_worker()
        self._core.has_worker = False

    def judge(self, loss: WorkerLost, lived: float = 0.0) -> tuple[list[SequenceOutput], int]:
        """Why the worker was lost that lived so many seconds, or the next before it was there.

        Returns:
            the end of the request that is to blame, if one is; and the number of deaths since there
            was progress.
        """
        judge = self.fault_isolation.on_kill if loss.from_outside else self.fault_isolation.on_death
        verdict = judge(self._flight)
        is_calm = lived >= CALM_LIFE and not self._flight
        self._flight = {}
        num_steps = self._core.counters.num_steps
        if num_steps > self._num_steps or is_calm:
            self._num_deaths = 0
        self._num_steps = num_steps
        self._num_deaths += not _is_progress(verdict)
        return self._end(verdict.culprit, str(loss)), self._num_deaths

    def restart(self, limits: SchedulerLimits) -> list[SequenceOutput]:
        """A new worker is ready, and counts plans from 1.

        Returns:
            the end, with an error, of the sequences that no longer fit within ``limits``.
        """
        core = self._core
        assert not core.has_worker
        core.limits = limits
        self._forget_worker()
        core.await_compiling()
        core.has_worker = True
        self._num_failures = 0
        core.next_number = 1
        longest = min(limits.max_model_len, limits.num_pages * limits.page_size)
        error = EngineError("the new worker has less room, and this request doesn't fit any more")
        finish = Finish(FinishReason.ERROR, error=error)
        # The first of each request is in line, whoever else of it is held.
        too_long = [each.sequence.request for each in core.waiting if each.limit > longest]
        ends = [core.finish_all(request, finish) for request in dict.fromkeys(too_long)]
        return list(itertools.chain.from_iterable(ends))

    def _end(self, culprit: Request | None, reason: str) -> list[SequenceOutput]:
        if culprit is None:
            return []
        error = EngineError(f"the worker failed on this request: {reason}")
        return self._core.finish_all(culprit, Finish(FinishReason.ERROR, error=error))

    def _forget_worker(self) -> None:
        """What the worker knew is gone: its slots, its pages, the plans on their way."""
        core = self._core
        core.in_flight.clear()
        for computation in core.running.take_all():
            computation.leave_slot()
            core.set_aside(computation)
        # Whoever was let go for a prompt that is gone may have to be held again.
        for computation in core.waiting.take_all():
            core.groups.enter(computation)
        core.rejoin()
        core.memory = Memory(core.limits, core.feeds)
        core.feeds.cache.on_cleared()


def _is_progress(verdict: Verdict) -> bool:
    return verdict.culprit is not None or verdict.narrowed


def _flight_of(plans: Iterable[InFlight]) -> Flight:
    """Who computes in ``plans``. A sequence that was preempted meanwhile computed all it had."""
    return {
        computation.sequence: computation.planned or computation.sequence.num_tokens
        for plan in plans
        for computation in plan.computations
    }
