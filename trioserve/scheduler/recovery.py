"""Recovery from failed plans and lost workers.

After a failure or loss, the worker's state is gone, and all sequences are queued again with their
tokens so far. Failures and deaths without progress are counted; a completed step is progress, and
so is a smaller number of suspects (:mod:`~.fault_isolation`). Past the limit of failures the worker
is given up. Past the limit of deaths, which is the supervisor's, the engine is. A worker that dies
with nothing to do after ``STABLE_SECONDS`` seconds counts like one that completed a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs

from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.requests.request import Finish, FinishReason, Request, SequenceOutput, State
from trioserve.scheduler.fault_isolation import Flight, Verdict
from trioserve.scheduler.limits import SchedulerLimits, most_tokens
from trioserve.scheduler.memory import Memory
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState

MAX_FAILURES = 3
"""Failures of plans without progress after which a worker is given up."""
STABLE_SECONDS = 60.0
"""Seconds that a worker must have lived for its idle death to count as progress."""


@attrs.define(eq=False)
class Recovery:
    """The handling of failures in a scheduler."""

    _state: SchedulerState
    _flight: Flight = attrs.field(init=False, factory=dict)
    """Sequences in flight when the worker was lost; empty once the loss has been judged."""
    _num_failures: int = attrs.field(init=False, default=0)
    _num_deaths: int = attrs.field(init=False, default=0)
    _num_steps: int = attrs.field(init=False, default=0)
    """Number of completed steps at the last death."""

    @property
    def unjudged(self) -> set[Request]:
        """Requests that were in flight at a loss that isn't judged yet."""
        return {sequence.request for sequence in self._flight}

    def on_step(self, plan: InFlight) -> None:
        """Note that ``plan`` has been computed and its rows are counted."""
        self._num_failures = 0
        self._state.fault_isolation.on_step(plan.seq_states)

    def on_failure(self, failure: wire.Failure) -> list[SequenceOutput]:
        """Handle the failure of a plan in flight: all sequences resume after a Reset.

        Only the culprit ends: the sequence that the worker names, or one found by fault isolation.
        The caller sends a Reset with the core's ``next_number`` before the next plan.

        Raises:
            WorkerLost: The worker can't go on, or fails again and again.
        """
        if failure.fatal:
            raise WorkerLost(f"plan {failure.number} failed: {failure.message}")
        plan = next((each for each in self._state.in_flight if each.number == failure.number), None)
        if plan is None:
            raise WorkerLost(f"plan {failure.number} failed and isn't in flight: {failure.message}")
        culprit: Request | None = None
        slots = plan.slots.tolist()
        if failure.slot in slots:
            sequence = plan.seq_states[slots.index(failure.slot)].sequence
            # If it has ended meanwhile, the other sequences of its request go on.
            culprit = None if sequence.state is State.FINISHED else sequence.request
        else:
            verdict = self._state.fault_isolation.on_death(_flight_of([plan]))
            culprit = verdict.culprit
            self._num_failures += not _is_progress(verdict)
            if self._num_failures == MAX_FAILURES:
                self._state.in_flight.clear()  # Cleared, so that this failure is judged only once.
                raise WorkerLost(f"plan {failure.number} failed: {failure.message}")
        outputs = self._end(culprit, failure.message)
        self._forget_worker()
        return outputs

    def on_worker_lost(self) -> None:
        """Handle the loss of the worker: all sequences wait, and no plans are built until a
        restart.
        """
        self._flight = _flight_of(self._state.in_flight)
        self._forget_worker()
        self._state.has_worker = False

    def judge(self, loss: WorkerLost, lived: float = 0.0) -> tuple[list[SequenceOutput], int]:
        """Judge why a worker was lost that lived for ``lived`` seconds, or never became ready.

        Returns:
            The end of the culprit, if one was found, and the number of deaths since there was
            progress.
        """
        judge = (
            self._state.fault_isolation.on_kill
            if loss.from_outside
            else self._state.fault_isolation.on_death
        )
        verdict = judge(self._flight)
        was_stable = lived >= STABLE_SECONDS and not self._flight
        self._flight = {}
        num_steps = self._state.counters.num_steps
        if num_steps > self._num_steps or was_stable:
            self._num_deaths = 0
        self._num_steps = num_steps
        # A lost link says nothing of the worker, and may be lost any number of times.
        self._num_deaths += not _is_progress(verdict) and loss.reason != "unreachable"
        return self._end(verdict.culprit, str(loss)), self._num_deaths

    def restart(self, limits: SchedulerLimits) -> list[SequenceOutput]:
        """Begin with a new worker that is ready and counts plans from 1.

        Returns:
            The ends, with an error, of the sequences that no longer fit within ``limits``.
        """
        state = self._state
        assert not state.has_worker
        state.limits = limits
        self._forget_worker()
        self._flight = {}  # A worker that was sent away has no loss to be judged.
        state.await_compiling()
        state.has_worker = True
        self._num_failures = 0
        state.next_number = 1
        error = EngineError("the new worker has less room, and this request doesn't fit any more")
        finish = Finish(FinishReason.ERROR, error=error)
        # The first sequence of each request is queued, even if others are held back.
        too_long = [each.sequence.request for each in state.waiting if not _fits(each, limits)]
        ends = [state.finish_all(request, finish) for request in dict.fromkeys(too_long)]
        return list(itertools.chain.from_iterable(ends))

    def _end(self, culprit: Request | None, reason: str) -> list[SequenceOutput]:
        if culprit is None:
            return []
        error = EngineError(f"the worker failed on this request: {reason}")
        return self._state.finish_all(culprit, Finish(FinishReason.ERROR, error=error))

    def _forget_worker(self) -> None:
        """Drop the worker's state: its slots, its pages, and the plans in flight."""
        state = self._state
        state.in_flight.clear()
        state.leaving.clear()
        for seq_state in state.running.take_all():
            seq_state.leave_slot()
            state.mark_preempted(seq_state)
        # Followers of a prompt that is gone may have to be held back again.
        for seq_state in state.waiting.take_all():
            seq_state.asked_elsewhere = False
            state.groups.enter(seq_state)
        state.requeue_preempted()
        state.memory.prefix.leave_index()
        state.memory = Memory(state.limits, state.feeds, state.disk_index)
        state.feeds.cache.on_cleared()
        state.feeds.note_load()


def _fits(seq_state: SequenceState, limits: SchedulerLimits) -> bool:
    """Return True if the sequence, and the other beams of its request, can run to its limit."""
    request = seq_state.sequence.request
    room = most_tokens(limits, len(request.prompt_ids), request.params.beam_width)
    return seq_state.limit <= min(limits.max_model_len, room)


def _is_progress(verdict: Verdict) -> bool:
    return verdict.culprit is not None or verdict.narrowed


def _flight_of(plans: Iterable[InFlight]) -> Flight:
    """Return the sequences that ``plans`` compute; one preempted meanwhile has computed all."""
    return {
        seq_state.sequence: seq_state.planned or seq_state.sequence.num_tokens
        for plan in plans
        for seq_state in plan.seq_states
    }
