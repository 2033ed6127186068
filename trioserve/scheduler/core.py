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

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import attrs

from trioserve.observability.scheduler_statistics import Observer, SchedulerStatistics
from trioserve.protocol import wire
from trioserve.protocol.errors import AdapterNotFound, WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.requests.tenants import TenantCounts
from trioserve.scheduler import policy
from trioserve.scheduler.adapter_residency import Residency
from trioserve.scheduler.drafts import plan_drafts
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.invariants import check_core
from trioserve.scheduler.limits import SchedulerLimits, prompt_logprobs_for, resolve_max_tokens
from trioserve.scheduler.memory import Memory
from trioserve.scheduler.pause_gate import PauseGate
from trioserve.scheduler.plan_builder import InFlight, PlanBuilder
from trioserve.scheduler.prefix_tree import PrefixMatch
from trioserve.scheduler.recovery import Recovery
from trioserve.scheduler.result_processing import ResultProcessor
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.sequence_group import SequenceGroups
from trioserve.scheduler.sequence_state import Running, SequenceState, adapter_word
from trioserve.scheduler.token_counts import Ints
from trioserve.scheduler.waiting_queue import WaitingQueue

MAX_PENDING = 8
"""Sequences that one plan may skip because this very plan computes their prefix."""


class SchedulerCore:
    """The scheduler's state and decisions. ``now`` is in seconds on trio's clock."""

    def __init__(
        self, limits: SchedulerLimits, observer: Observer | None = None, feeds: Feeds | None = None
    ) -> None:
        self.limits = limits
        self.feeds = feeds or Feeds()
        self.memory = Memory(limits, self.feeds)
        self.waiting = WaitingQueue()
        self.groups = SequenceGroups(self.waiting)
        """Sequences that wait for the pages of their request's prompt."""
        self.running = Running()
        self.preempted: list[SequenceState] = []
        """Preempted sequences that a plan in flight still names; the others are queued again."""
        self.in_flight: deque[InFlight] = deque()
        self.residency = Residency(limits.max_cpu_loras, limits.max_loras)
        """Adapters that the worker holds."""
        self.uncompiled: dict[Grammar, None] = {}
        """Grammars that the worker still has to compile. Sequences that follow one of them wait."""
        self.pause_gate = PauseGate()
        """Pauses, which keep sequences from being computed."""
        self.counters = self.feeds.counters
        self.next_number = 1
        """Number of the next plan."""
        self.num_waiting_tokens = 0
        """Tokens, prompt and output so far, of all sequences that wait for a slot."""
        self.waiting_of_tenants = TenantCounts()
        """Sequences that wait for a slot and their tokens, by tenant."""
        self._observer = observer
        self._results = ResultProcessor(self, observer)
        self.has_worker = True
        self.recovery = Recovery(self)
        """Handles failed plans and lost workers."""
        self.num_arrivals = 0
        """Number of requests ever submitted, which is the newest request's arrival number."""
        self.now = 0.0
        """Time of the last call that gave one."""
        self._has_work = False
        """True if a sequence could be computed when the newest result had been taken."""

    # ---- submission and abort

    def submit(self, request: Request, now: float) -> None:
        """Queue the sequences of ``request`` that have not finished.

        Raises:
            InvalidRequest: The request can't be served.
            AdapterNotFound: Its adapter was unloaded meanwhile.
            ContextTooLong: The request can never fit; the message says by how much.
        """
        if request.adapter and request.adapter not in self.residency.known:
            raise AdapterNotFound("the request's adapter was unloaded")
        self.now = now
        max_tokens = resolve_max_tokens(self.limits, request)
        request.prompt_logprobs = prompt_logprobs_for(self.limits, request)
        self.num_arrivals += 1
        request.times.queued = now
        for sequence in request.sequences:
            if sequence.state is State.FINISHED:
                continue
            sequence.max_tokens = max_tokens
            sequence.compute = SequenceState.of(sequence, self.limits, self.num_arrivals)
            self._wait(sequence.compute)

    def _wait(self, computation: SequenceState) -> None:
        """Queue the sequence, or hold it back for its leader's prompt."""
        self._move(computation.sequence, State.WAITING)
        self._count_waiting(computation.sequence, 1)
        self.groups.enter(computation)

    def _count_waiting(self, sequence: Sequence, sign: int) -> None:
        num_tokens = sign * sequence.num_tokens
        self.num_waiting_tokens += num_tokens
        self.waiting_of_tenants.add(sequence.request.tenant, sign, num_tokens)

    def _move(self, sequence: Sequence, state: State) -> None:
        sequence.move_to(state)
        sequence.note_detour(self.now)

    def abort(self, sequence: Sequence, finish: Finish) -> SequenceOutput | None:
        """End ``sequence``, whatever its state; return None if it has already finished.

        The next plan closes its slot. Its rows in flight are computed, and their tokens are
        dropped.
        """
        if sequence.state is State.FINISHED:
            return None
        self.finish(sequence, finish)
        return _end_of(sequence, finish)

    def drop(self, sequence: Sequence) -> wire.Drop | None:
        """Return a message that spares the worker the rows of ``sequence``, about to be aborted.

        The result is None if nothing can be spared. The oldest plan is already running, so its rows
        can't be dropped. Nor can rows be dropped if another sequence reads their KV.
        """
        computation = sequence.compute
        if not computation.holds_slot or not self.in_flight:
            return None
        oldest = self.in_flight[0].number
        if computation.last_plan <= oldest or not self.memory.retract(computation, oldest):
            return None
        return wire.Drop(slot=computation.slot, generation=computation.generation)

    # ---- a plan

    def next_plan(self, now: float) -> wire.Plan | None:
        """Return the worker's next plan; None if there is nothing to do or enough is in flight."""
        self.now = now
        if not self.has_worker or len(self.in_flight) >= self.limits.max_plans_in_flight:
            return None
        self.memory.advance(now)
        builder = PlanBuilder(self.next_number, self.limits.max_num_batched_tokens)
        if self.recovery.fault_isolation.restricts:
            self._preempt_non_suspects()
        if not self.pause_gate.is_closed:
            self._plan_running(builder)
            self._plan_admissions(builder, now)
            self.groups.release()
            if self.limits.max_row_tokens > 1:
                plan_drafts(builder, self.memory, self.limits.max_row_tokens)
        closed, copies = self.memory.slots.take_unclosed(), self.memory.prefix.take_copies()
        sealed = builder.build(closed, copies, self.memory.counts)
        if sealed is None:
            return None
        plan, in_flight = sealed
        self.in_flight.append(in_flight)
        self.next_number += 1
        return plan

    def _preempt_non_suspects(self) -> None:
        """Preempt every running sequence outside the probation group."""
        may_run = self._probation_rule()
        for computation in list(self.running):
            if not may_run(computation.sequence.request):
                self._preempt(computation)

    def _probation_rule(self) -> Callable[[Request], bool]:
        """Return a predicate for the requests that may be computed while there are suspects.

        If all requests of the probation group wait for a grammar, requests that aren't suspects run
        meanwhile.
        """
        fault_isolation = self.recovery.fault_isolation
        if self.uncompiled:
            suspects = set(fault_isolation.suspects)
            group = [request for request in fault_isolation.probation if request in suspects]
            if all(each.sequences[0].sampler.grammar in self.uncompiled for each in group):
                return lambda request: request not in suspects
        return fault_isolation.may_run

    def _plan_running(self, builder: PlanBuilder) -> None:
        """Give the running sequences their tokens."""
        counts, slots = self.memory.counts, self.running.slots
        if not len(slots):
            return
        length, planned = counts.length[slots], counts.planned[slots]
        may_run = length < counts.limit[slots]
        if self.limits.max_row_tokens > 1:
            may_run &= ~counts.unsettled[slots]
        share = policy.Share.out(
            length - planned,
            may_run,
            builder.budget,
            self.limits.max_prompt_tokens_beside_decodes,
        )
        chunks = [(self.running[place], count) for place, count in share.chunks]
        # A running sequence has pages for its whole prompt, so only decodes need more.
        needy = share.decodes[planned[share.decodes] >= counts.room[slots[share.decodes]]]
        if len(needy) <= self.memory.num_available:
            for computation in self.running.at(needy):
                self._allocate_page(computation, builder)
            steady = counts.decodes[slots[share.decodes]]
            self._decode(share.decodes[steady], builder)
            last_of_prompt = self.running.at(share.decodes[~steady])
            chunks = [*((each, 1) for each in last_of_prompt), *chunks]
        else:
            self._decode_one_by_one(self.running.at(share.decodes), builder)
        for computation, count in chunks:
            if computation.holds_slot:
                self._compute(computation, count, builder)
        builder.budget = min(builder.budget, share.left)

    def _decode(self, places: Ints, builder: PlanBuilder) -> None:
        """Add a row of one token for each sequence at ``places``: decodes with a page for it."""
        slots = self.running.slots[places]
        builder.add_decodes(self.running.at(places), slots, self.memory.counts.planned[slots])
        self.memory.counts.advance(slots, builder.number)

    def _decode_one_by_one(self, decodes: list[SequenceState], builder: PlanBuilder) -> None:
        """Add the rows of ``decodes`` one at a time, preempting where pages run out.

        A sequence that is preempted on the way gets no row.
        """
        for computation in decodes:
            if computation.holds_slot and (
                self.memory.has_page_for_next(computation)
                or self._allocate_page(computation, builder)
            ):
                self._compute(computation, 1, builder)

    def _allocate_page(self, computation: SequenceState, builder: PlanBuilder) -> bool:
        """Append a page to the block table, preempting the youngest sequences if necessary.

        Return False if the sequence gets no row in this plan: either results in flight will free
        enough pages, or it was the youngest itself and has been preempted.
        """
        while (page := self.memory.append_page(computation)) is None:
            if self.memory.pool.num_retiring:
                return False
            victim = policy.choose_victim(list(self.running))
            self._preempt_for_pages(victim)
            if victim is computation:
                return False
        builder.append_page(computation, page)
        return True

    def _plan_admissions(self, builder: PlanBuilder, now: float) -> None:
        """Admit waiting sequences in the order of turns until one doesn't fit.

        Some sequences are skipped without stopping those behind them. A sequence is skipped if this
        very plan computes its prefix: the next plan can give it those pages instead of computing
        them again. A preempted sequence is skipped until the worker certainly has its grammar. A
        sequence that waits for an adapter stops only others with an adapter. Nothing is admitted
        before the sequences just preempted are back at the front of the queue.
        """
        if not self.waiting:
            self.residency.clear_places()
            return
        if self.preempted or not self._has_room(builder):
            return
        num_pending = 0
        adapters = self.residency.begin_pass(self.running_adapters)
        for computation in policy.admission_order(
            self.limits.scheduling_policy,
            self.waiting.in_turn(self._entry_rule()),
            lambda waiting: len(self.memory.match(waiting, builder.number).nodes),
        ):
            if not adapters.admits(computation.adapter):
                continue
            match = self.memory.match(computation, builder.number)
            if match.pending:
                num_pending += 1
                if num_pending == MAX_PENDING:
                    return
                continue
            if not self.memory.fits(computation, match, self.running.slots):
                return
            grammar = computation.sequence.sampler.grammar
            if grammar is not None and computation.left_grammar:
                self.uncompiled[grammar] = None
                continue
            self._open(computation, match, builder, now)
            if not self._has_room(builder):
                return

    def _entry_rule(self) -> Callable[[SequenceState], bool]:
        """Return a predicate for the waiting sequences that may be admitted now."""
        restricts = self.recovery.fault_isolation.restricts
        may_run = self._probation_rule() if restricts else lambda request: True

        def may_enter(computation: SequenceState) -> bool:
            sequence = computation.sequence
            return (
                self.pause_gate.admits(computation.arrival)
                and may_run(sequence.request)
                and not (self.uncompiled and sequence.sampler.grammar in self.uncompiled)
            )

        return may_enter

    def _has_room(self, builder: PlanBuilder) -> bool:
        """Return True if one more sequence may run: a slot is free, and a token is left for it.

        So there are never more running sequences than tokens in a plan.
        """
        return builder.may_open and self.memory.slots.num_free > 0

    def _open(
        self, computation: SequenceState, match: PrefixMatch, builder: PlanBuilder, now: float
    ) -> None:
        """Move a waiting sequence into a slot, and give it its first row."""
        self.memory.enter(computation, match)
        self.counters.prefix_cache_queries += computation.length
        self.counters.prefix_cache_hits += computation.computed
        self.waiting.admit(computation, self.running)
        self._count_waiting(computation.sequence, -1)
        self.running.add(computation)
        self._move(computation.sequence, State.PREFILL)
        request = computation.sequence.request
        if request.times.first_scheduled is None:
            request.times.first_scheduled = now
            request.num_cached_tokens = computation.computed
        builder.open(computation)
        self._compute(computation, min(computation.remaining, builder.budget), builder)

    def _compute(self, computation: SequenceState, count: int, builder: PlanBuilder) -> None:
        """Add a row of ``count`` tokens."""
        samples = count == computation.remaining
        builder.add_row(computation, count, samples)
        computation.add_row(count, samples, builder.number)
        if computation.sequence.state is State.PREFILL:
            self.memory.publish(computation, builder.number)
            if samples:
                self._move(computation.sequence, State.DECODE)
                self.groups.on_prompt_planned(computation)

    # ---- leaving

    def _preempt_for_pages(self, computation: SequenceState) -> None:
        """Preempt a sequence because another one needs its pages."""
        self.counters.num_preemptions += 1
        self._preempt(computation)

    def _preempt(self, computation: SequenceState) -> None:
        """Preempt a sequence: take its slot and pages. It resumes from its tokens."""
        self._leave(computation)
        self.mark_preempted(computation)
        self.requeue_preempted()

    def mark_preempted(self, computation: SequenceState) -> None:
        """Note a sequence that has left its slot; it is queued again once no plan names it."""
        computation.left_grammar = True
        self._move(computation.sequence, State.PREEMPTED)
        self.preempted.append(computation)

    def retract_running(self) -> None:
        """Preempt all running sequences; they resume from their tokens."""
        for computation in list(self.running):
            self._preempt(computation)

    def requeue_preempted(self) -> None:
        """Queue the preempted sequences that no plan in flight names any more."""
        oldest = self.in_flight[0].number if self.in_flight else self.next_number
        for computation in [each for each in self.preempted if each.last_plan < oldest]:
            self.preempted.remove(computation)
            self._wait(computation)

    def _leave(self, computation: SequenceState) -> None:
        self.running.remove(computation)
        self.memory.leave(computation)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence``, which hasn't finished, and free what it holds."""
        if sequence.state in (State.PREFILL, State.DECODE):
            self._leave(sequence.compute)
        elif sequence.state is State.WAITING:
            queue = self.groups if sequence.compute.is_held else self.waiting
            queue.remove(sequence.compute)
            self._count_waiting(sequence, -1)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence.compute)
        sequence.compute = None
        sequence.finish = finish
        sequence.move_to(State.FINISHED)
        self.recovery.fault_isolation.forget(sequence)
        self.groups.on_finished(sequence.request)

    def finish_all(self, request: Request, finish: Finish) -> list[SequenceOutput]:
        """End every unfinished sequence of ``request`` at once."""
        alive = [sequence for sequence in request.sequences if sequence.state is not State.FINISHED]
        # The last first, so that none of them becomes the leader on the way.
        for sequence in reversed(alive):
            self.finish(sequence, finish)
        return [_end_of(each, finish) for each in alive]

    # ---- a result

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
        self.memory.acknowledge(plan.number)
        self.counters.count_step(result, plan.num_tokens, plan.num_decodes, had_work=self._has_work)
        sampled_before = self.counters.num_tokens_sampled
        for logprobs, piece in results.pieces:
            logprobs.add(piece)
        outputs = self._results.take(plan, results, now)
        if self._observer is not None and plan.num_tokens:
            num_sampled = self.counters.num_tokens_sampled - sampled_before
            self._observer.observe_step(plan.num_tokens - plan.num_decodes + num_sampled)
        self.recovery.on_step(plan)
        self.requeue_preempted()
        self._has_work = bool(self.running or self.waiting)
        if self.feeds.iterations.feed.is_wanted:
            self.feeds.iterations.note(self, plan, result, now)
        return outputs

    # ---- observation

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot, including those held back for a leader's prompt."""
        return len(self.waiting) + len(self.groups)

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that have not finished, in any state."""
        return self.num_waiting + len(self.running) + len(self.preempted)

    @property
    def is_drained(self) -> bool:
        """True if the worker has nothing to do and has been told of every closed slot."""
        return not self.in_flight and not self.memory.slots.num_unclosed

    def num_unfinished_until(self, arrival: int) -> int:
        """Return the number of unfinished sequences that arrived no later than ``arrival``."""
        return sum(each.arrival <= arrival for each in self._unfinished())

    def has_adapter_users(self, number: int) -> bool:
        """Return True if an unfinished sequence uses that adapter."""
        return any(each.adapter == number for each in self._unfinished())

    def forget_adapter(self, number: int) -> None:
        """Forget an adapter that no sequence uses any more, and its cached prefixes."""
        self.residency.forget(number)
        self.memory.prefix.drop(lambda namespace: namespace[1:2] == (adapter_word(number),))

    def adapters_in_use(self) -> tuple[set[int], set[int]]:
        """Return the adapters of running and of waiting sequences; 0 stands for none."""
        running = self.running_adapters()
        waiting = itertools.chain(self.waiting, self.groups, self.preempted)
        return running, {each.adapter for each in waiting}

    def running_adapters(self) -> set[int]:
        """Return the adapters of running sequences, 0 included if one has none."""
        return {each.adapter for each in self.running}

    def requests_waiting_for(self, grammar: Grammar) -> list[Request]:
        """Return the requests that follow ``grammar`` and have a sequence without a slot."""
        waiting = (each.sequence for each in self._unfinished() if not each.holds_slot)
        return list(
            dict.fromkeys(each.request for each in waiting if each.sampler.grammar == grammar)
        )

    def await_compiling(self) -> None:
        """Make all sequences with a grammar wait until the worker has compiled it again."""
        grammars = (each.sequence.sampler.grammar for each in self._unfinished())
        self.uncompiled = {grammar: None for grammar in grammars if grammar is not None}

    def on_compiled(self, grammar: Grammar) -> None:
        """Let the sequences that follow ``grammar`` be computed: the worker has compiled it."""
        del self.uncompiled[grammar]
        for each in self._unfinished():
            if each.sequence.sampler.grammar == grammar:
                each.left_grammar = False

    def _unfinished(self) -> Iterator[SequenceState]:
        queues = (self.waiting, self.groups, self.running, self.preempted)
        return itertools.chain.from_iterable(queues)

    def statistics(self) -> SchedulerStatistics:
        """Return a snapshot."""
        pool = self.memory.pool
        return SchedulerStatistics(
            **attrs.asdict(self.counters),
            num_waiting=self.num_waiting,
            num_running=len(self.running),
            plans_in_flight=len(self.in_flight),
            pages_free=pool.num_free,
            pages_cached=pool.num_idle,
            pages_held=pool.num_held,
            pages_total=pool.num_pages,
            host_pages_cached=pool.host.num_stored,
            host_pages_total=pool.num_host_pages,
        )

    def check_integrity(self) -> None:
        """Assert the invariants that :mod:`trioserve.scheduler.invariants` lists."""
        check_core(self)


def _end_of(sequence: Sequence, finish: Finish) -> SequenceOutput:
    """Return the output of a sequence that ends without another token."""
    logprobs = None if sequence.request.params.logprobs is None else ()
    return SequenceOutput(sequence, logprobs=logprobs, finish=finish)
