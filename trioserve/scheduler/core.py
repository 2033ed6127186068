"""The scheduler as a state machine: no task, no I/O, no clock.

Requests enter by :meth:`SchedulerCore.submit`. :meth:`SchedulerCore.next_plan` builds the worker's
next step, :meth:`SchedulerCore.on_result` takes its result, and several plans may be in flight in
between. Plan N+1 is built before the tokens of plan N are known, so every sequence is counted ahead
(:class:`~trioserve.scheduler.sequence_state.SequenceState`): a row that samples makes its sequence
one token longer, whichever token it will be. A sequence is not planned again once its last token by
length is in flight. A sequence that stops earlier in plan N has at most one row in each later plan,
and the tokens of those rows are dropped.

A sequence that leaves gives back its slot and pages. They can be used again once the last plan that
names the sequence has been acknowledged; :mod:`~trioserve.scheduler.slots` and
:mod:`~trioserve.scheduler.page_pool` keep track of that. A preempted sequence waits for the same
moment before it rejoins the queue, so that its tokens in flight still arrive. It resumes like a new
sequence, with its prompt and output as the prompt.

One sequence of a request computes the prompt for all of them
(:mod:`~trioserve.scheduler.sequence_group`). An error of one sequence ends the whole request.
:mod:`~trioserve.scheduler.recovery` handles failed plans and lost workers.
"""

from __future__ import annotations

import attrs
import numpy as np

from trioserve.observability.scheduler_statistics import Observer, sum_by_position
from trioserve.protocol import wire
from trioserve.protocol.errors import AdapterNotFound, WorkerLost
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.scheduler.beams import BeamGroup, Beams, StopStringAtEnd
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.handing_over import hand_over, send_ahead
from trioserve.scheduler.invariants import check_state
from trioserve.scheduler.limits import (
    SchedulerLimits,
    check_beams,
    prompt_logprobs_for,
    resolve_max_tokens,
    tensors_for,
)
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.planning import Planner
from trioserve.scheduler.recovery import Recovery
from trioserve.scheduler.result_processing import ResultProcessor
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState, end_of
from trioserve.scheduler.token_counts import Ints


class SchedulerCore(SchedulerState):
    """The scheduler's state and decisions. ``now`` is in seconds on trio's clock."""

    def __init__(
        self, limits: SchedulerLimits, observer: Observer | None = None, feeds: Feeds | None = None
    ) -> None:
        super().__init__(limits, feeds or Feeds())
        self._observer = observer
        beams = Beams(self, observer)
        self._planner = Planner(self, beams)
        self._results = ResultProcessor(self, beams, observer)
        self.recovery = Recovery(self)
        """Handles failed plans and lost workers."""
        self._has_work = False
        """True if a sequence could be computed when the newest result had been taken."""

    def submit(
        self, request: Request, now: float, stop_string_at_end: StopStringAtEnd | None = None
    ) -> None:
        """Queue the sequences of ``request`` that have not finished.

        Beams end by a stop string if ``stop_string_at_end`` finds it.

        Raises:
            InvalidRequest: The request can't be served.
            AdapterNotFound: Its adapter was unloaded meanwhile.
            ContextTooLong: The request can never fit; the message says by how much.
        """
        if request.adapter and request.adapter not in self.residency.known:
            raise AdapterNotFound("the request's adapter was unloaded")
        self.now = now
        check_beams(self.limits, request)
        max_tokens = resolve_max_tokens(self.limits, request)
        request.prompt_logprobs = prompt_logprobs_for(self.limits, request)
        request.tensors = tensors_for(self.limits, request, max_tokens)
        self.num_arrivals += 1
        request.times.queued = now
        if request.params.beam_width:
            _add_beams(request, max_tokens, stop_string_at_end)
        for sequence in request.all_sequences:
            if sequence.state is State.FINISHED:
                continue
            sequence.max_tokens = max_tokens
            sequence.seq_state = SequenceState.of(sequence, self.limits, self.num_arrivals)
            self.enqueue(sequence.seq_state)

    def abort(self, sequence: Sequence, finish: Finish) -> SequenceOutput | None:
        """End ``sequence``, whatever its state; return None if it has already finished.

        The next plan closes its slot. Its rows in flight are computed, and their tokens are
        dropped. The outputs of a beam search have to be aborted together.
        """
        if sequence.state is State.FINISHED:
            return None
        self.finish(sequence, finish)
        return end_of(sequence, finish)

    def drop(self, sequence: Sequence) -> wire.Drop | None:
        """Return a message that spares the worker the rows of ``sequence``, about to be aborted.

        The result is None if nothing can be spared. The oldest plan may be running, so its rows
        can't be dropped. Nor can rows be dropped if another sequence reads their KV.
        """
        seq_state = sequence.seq_state
        if not seq_state.holds_slot or not self.in_flight:
            return None
        oldest = self.in_flight[0].number
        if seq_state.last_plan <= oldest or not self.memory.retract(seq_state, oldest):
            return None
        return wire.Drop(slot=seq_state.slot, generation=seq_state.generation, plan=oldest)

    def unfinished_requests(self) -> list[Request]:
        """Return the requests with sequences that haven't finished."""
        return list(dict.fromkeys(each.sequence.request for each in self._unfinished()))

    def next_plan(self, now: float) -> wire.Plan | None:
        """Return the worker's next plan; None if there is nothing to do or enough is in flight."""
        plan = self._planner.next_plan(now)
        if self.chunks:
            send_ahead(self)
        return plan

    def on_result(self, result: wire.StepResult, now: float) -> list[SequenceOutput]:
        """Take the result of the oldest plan in flight.

        Raises:
            WorkerLost: The result doesn't answer that plan. Nothing has been taken.
        """
        if not self.in_flight:
            raise WorkerLost(f"result of plan {result.number} came, and none is in flight")
        self.now = now
        plan = self.in_flight[0]
        results = Results.read(result, plan, self.limits.vocab_size)
        self.in_flight.popleft()
        if self.memory.slots.num_retiring:
            self.feeds.note_load()
        self.memory.acknowledge(plan.number)
        self.counters.count_step(result, plan.num_tokens, plan.num_decodes, had_work=self._has_work)
        load = plan.load
        if results.drafted is not None:
            self._count_drafts(plan, results.drafted, results.offsets)
            load = attrs.evolve(load, decodes=load.decodes + int(results.drafted.sum()))
        self.step_times.observe(load, (result.step_us + result.gap_us) / 1e6)
        sampled_before = self.counters.num_tokens_sampled
        for logprobs, piece in results.pieces:
            logprobs.add(piece)
        for sequence, rows in results.tensors:
            sequence.request.take_rows(sequence.index, rows)
        outputs = self._results.take(plan, results, now)
        if self._observer is not None and plan.num_tokens:
            num_sampled = self.counters.num_tokens_sampled - sampled_before
            self._observer.observe_step(plan.num_tokens - plan.num_decodes + num_sampled)
        self.recovery.on_step(plan)
        self.requeue_preempted()
        if self.leaving:
            hand_over(self)
        self._has_work = bool(self.running or self.waiting)
        if self.feeds.iterations.feed.is_wanted:
            self.feeds.iterations.note(self.statistics(), plan, result, now)
        return outputs

    def _count_drafts(self, plan: InFlight, drafted: Ints, offsets: Ints) -> None:
        """Count the drafts that rows verified, and those that gave tokens."""
        rows = drafted > 0
        self.counters.num_drafts += int(rows.sum())
        self.counters.num_draft_tokens += int(drafted.sum())
        accepted = np.maximum(offsets[1:] - offsets[:-1] - 1, 0)[rows]
        self.counters.num_accepted_drafts += int(accepted.sum())
        for index, count in zip(rows.nonzero()[0].tolist(), accepted.tolist(), strict=True):
            sequence = plan.seq_states[index].sequence
            sequence.num_draft_tokens += int(drafted[index])
            sequence.num_accepted_drafts += count
        # Row by row, positions 0 to one less than the accepted.
        places = [int((accepted > place).sum()) for place in range(accepted.max(initial=0))]
        so_far = self.counters.accepted_by_position
        self.counters.accepted_by_position = sum_by_position([so_far, tuple(places)])

    def check_integrity(self) -> None:
        """Assert the invariants that :mod:`trioserve.scheduler.invariants` lists."""
        check_state(self)


def _add_beams(
    request: Request, max_tokens: int, stop_string_at_end: StopStringAtEnd | None
) -> None:
    """Add the record of a beam search, and the spare sequences that it needs."""
    first = request.sequences[0]
    request.beams = BeamGroup.of(request, max_tokens, stop_string_at_end)
    request.spare_sequences = [
        Sequence(
            request=request,
            index=index,
            sampler=attrs.evolve(first.sampler, sequence_index=index),
        )
        for index in range(len(request.sequences), request.params.beam_width)
    ]
