"""The scheduler as a state machine: no task, no I/O, no clock.

Requests go in by :meth:`SchedulerCore.submit`. :meth:`SchedulerCore.next_plan` makes the worker's
next step, :meth:`SchedulerCore.on_result` takes what came of it, and as many plans as the limits
allow may lie between the two. Plan N+1 is made before the tokens of plan N are known, so every
sequence is counted ahead (:class:`~trioserve.scheduler.sequence_state.SequenceState`): a row of
plan N that samples makes its sequence one token longer, whatever the token will be. A sequence
whose last token by length is in flight is not planned again; one that turns out to have stopped in
plan N has at most a row in each plan in flight, whose tokens are dropped.

What a sequence gives back when it leaves (its slot and pages) is out of reach until the last plan
that names it has been acknowledged; :mod:`~trioserve.scheduler.slots` and
:mod:`~trioserve.scheduler.page_pool` see to it. A preempted sequence waits for that too before it
rejoins the line, so that its tokens in flight still arrive. It resumes as if it were new, with its
prompt and output as the prompt.

Of the sequences of one request, one computes the prompt for all (:mod:`~.groups`). An error of
one is the end of all of them. What happens when a plan fails or the worker is lost is
:mod:`~.recovery`'s.
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
from trioserve.scheduler.prefix_cache import PrefixMatch
from trioserve.scheduler.recovery import Recovery
from trioserve.scheduler.result_processing import ResultProcessor
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.sequence_group import SequenceGroups
from trioserve.scheduler.sequence_state import Running, SequenceState, adapter_word
from trioserve.scheduler.token_counts import Ints
from trioserve.scheduler.waiting_queue import WaitingQueue

MAX_PENDING = 8
"""How many of the waiting may be put off in one plan for a prefix that this plan computes."""


class SchedulerCore:
    """Everything that the scheduler knows and decides. ``now`` is in seconds on trio's clock."""

    def __init__(
        self, limits: SchedulerLimits, observer: Observer | None = None, feeds: Feeds | None = None
    ) -> None:
        self.limits = limits
        self.feeds = feeds or Feeds()
        self.memory = Memory(limits, self.feeds)
        self.waiting = WaitingQueue()
        self.groups = SequenceGroups(self.waiting)
        """Those who wait for the pages of their request's prompt."""
        self.running = Running()
        self.preempted: list[SequenceState] = []
        """Those that plans in flight still name; the others are back in line."""
        self.in_flight: deque[InFlight] = deque()
        self.residency = Residency(limits.max_cpu_loras, limits.max_loras)
        """Which adapters the worker holds."""
        self.uncompiled: dict[Grammar, None] = {}
        """What the worker has still to compile: sequences that follow one of them wait."""
        self.pause_gate = PauseGate()
        """What keeps those who could be computed from it."""
        self.counters = self.feeds.counters
        self.next_number = 1
        """The number of the next plan."""
        self.num_waiting_tokens = 0
        """Prompt and output so far of all who wait for a slot."""
        self.waiting_of_tenants = TenantCounts()
        """Of sequences that wait for a slot, and of their tokens."""
        self._observer = observer
        self._results = ResultProcessor(self, observer)
        self.has_worker = True
        self.recovery = Recovery(self)
        """What to call when a plan fails or the worker is lost."""
        self.num_arrivals = 0
        """Requests that were ever submitted; the newest one's place in the order of arrival."""
        self.now = 0.0
        """The time that it was told last."""
        self._has_work = False
        """Whether somebody wanted to be computed when the newest result had been taken."""

    # ---- requests come and go

    def submit(self, request: Request, now: float) -> None:
        """Put the sequences of ``request`` that have not finished in line.

        Raises:
            InvalidRequest: it can't be served.
            AdapterNotFound: its adapter has left meanwhile.
            ContextTooLong: it can never fit; the message says by how much.
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
        """Put ``computation`` in line, or where it is held."""
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
        """End ``sequence`` in whatever state it is; None if it has finished already.

        The next plan closes its slot. Rows in flight are computed, their tokens dropped.
        """
        if sequence.state is State.FINISHED:
            return None
        self.finish(sequence, finish)
        return _end_of(sequence, finish)

    def drop(self, sequence: Sequence) -> wire.Drop | None:
        """What spares the worker rows of ``sequence``, which is about to be aborted.

        Of the oldest plan in flight there is nothing to be spared: it has begun. Nor is there where
        somebody else's rows read what those rows compute.
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
        """What the worker is to do next; None if there is nothing, or enough is in flight."""
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
        """Whoever isn't on trial waits, and holds nothing that those who are may need."""
        may_run = self._trial_rule()
        for computation in list(self.running):
            if not may_run(computation.sequence.request):
                self._preempt(computation)

    def _trial_rule(self) -> Callable[[Request], bool]:
        """Return which requests may be computed while there are suspects.

        A trial whose requests all wait for a grammar goes on later: the requests above suspicion
        are computed meanwhile.
        """
        fault_isolation = self.recovery.fault_isolation
        if self.uncompiled:
            suspects = set(fault_isolation.suspects)
            tried = [request for request in fault_isolation.probation if request in suspects]
            if all(each.sequences[0].sampler.grammar in self.uncompiled for each in tried):
                return lambda request: request not in suspects
        return fault_isolation.may_run

    def _plan_running(self, builder: PlanBuilder) -> None:
        """Give the running their tokens."""
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
        # A running sequence has pages for its prompt, so only those that decode need more.
        needy = share.decodes[planned[share.decodes] >= counts.room[slots[share.decodes]]]
        if len(needy) <= self.memory.num_available:
            for computation in self.running.at(needy):
                self._grow(computation, builder)
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
        """A row of one token for those at ``places`` in line, who decode and have a page for it."""
        slots = self.running.slots[places]
        builder.add_decodes(self.running.at(places), slots, self.memory.counts.planned[slots])
        self.memory.counts.advance(slots, builder.number)

    def _decode_one_by_one(self, decodes: list[SequenceState], builder: PlanBuilder) -> None:
        """The same where pages run out: who is preempted on the way has no slot at its turn."""
        for computation in decodes:
            if computation.holds_slot and (
                self.memory.has_page_for_next(computation) or self._grow(computation, builder)
            ):
                self._compute(computation, 1, builder)

    def _grow(self, computation: SequenceState, builder: PlanBuilder) -> bool:
        """Append a page to the block table, preempting from the back of the line if need be.

        False if ``computation`` gets no row in this plan: pages that will do come back with results
        in flight, or it was itself the last in line and has been preempted.
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
        """Let the waiting in, in the order of turns, until somebody doesn't fit.

        Who waits for a prefix that this very plan computes is put off and costs nobody else a turn:
        it can have those pages in the next plan instead of computing them again. A sequence that
        lost its slot is put off until the worker has its grammar for certain. Who waits for an
        adapter costs only those a turn who have one, too. Nobody comes in before those who have
        just been preempted are back in line, in front.
        """
        if not self.waiting:
            self.residency.clear_places()
            return
        if self.preempted or not self._has_seat(builder):
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
            if not self._has_seat(builder):
                return

    def _entry_rule(self) -> Callable[[SequenceState], bool]:
        """Return which of the waiting may enter at all now."""
        restricts = self.recovery.fault_isolation.restricts
        may_run = self._trial_rule() if restricts else lambda request: True

        def may_enter(computation: SequenceState) -> bool:
            sequence = computation.sequence
            return (
                self.pause_gate.admits(computation.arrival)
                and may_run(sequence.request)
                and not (self.uncompiled and sequence.sampler.grammar in self.uncompiled)
            )

        return may_enter

    def _has_seat(self, builder: PlanBuilder) -> bool:
        """Whether one more may run: it takes a slot, and a token that nobody in the running wants.

        So there are never more in the running than tokens in a plan.
        """
        return builder.may_open and self.memory.slots.num_free > 0

    def _open(
        self, computation: SequenceState, match: PrefixMatch, builder: PlanBuilder, now: float
    ) -> None:
        """Move ``computation`` from the line into a slot, and give it its first row."""
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
        """Give ``computation`` a row of ``count`` tokens."""
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
        """Take the slot and pages of ``computation`` away, for somebody else needs them."""
        self.counters.num_preemptions += 1
        self._preempt(computation)

    def _preempt(self, computation: SequenceState) -> None:
        """Have ``computation`` wait, without a slot; it will resume from its tokens."""
        self._leave(computation)
        self.set_aside(computation)
        self.rejoin()

    def set_aside(self, computation: SequenceState) -> None:
        """``computation``, which has left its slot, rejoins the line when no plan names it."""
        computation.left_grammar = True
        self._move(computation.sequence, State.PREEMPTED)
        self.preempted.append(computation)

    def retract_running(self) -> None:
        """Have all who run wait, and resume from their tokens once they may be computed again."""
        for computation in list(self.running):
            self._preempt(computation)

    def rejoin(self) -> None:
        """Put the preempted back in line whom no plan in flight names."""
        oldest = self.in_flight[0].number if self.in_flight else self.next_number
        for computation in [each for each in self.preempted if each.last_plan < oldest]:
            self.preempted.remove(computation)
            self._wait(computation)

    def _leave(self, computation: SequenceState) -> None:
        self.running.remove(computation)
        self.memory.leave(computation)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence``, which hasn't finished, and take back what it holds."""
        if sequence.state in (State.PREFILL, State.DECODE):
            self._leave(sequence.compute)
        elif sequence.state is State.WAITING:
            line = self.groups if sequence.compute.is_held else self.waiting
            line.remove(sequence.compute)
            self._count_waiting(sequence, -1)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence.compute)
        sequence.compute = None
        sequence.finish = finish
        sequence.move_to(State.FINISHED)
        self.recovery.fault_isolation.forget(sequence)
        self.groups.on_finished(sequence.request)

    def finish_all(self, request: Request, finish: Finish) -> list[SequenceOutput]:
        """End every sequence of ``request`` that hasn't ended, in one go."""
        alive = [sequence for sequence in request.sequences if sequence.state is not State.FINISHED]
        for sequence in reversed(alive):  # Nobody is to lead the others on the way.
            self.finish(sequence, finish)
        return [_end_of(each, finish) for each in alive]

    # ---- a result

    def on_result(self, result: wire.StepResult, now: float) -> list[SequenceOutput]:
        """Take what the oldest plan in flight gave.

        Raises:
            WorkerLost: it doesn't answer that plan. Nothing has been taken.
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
        self.rejoin()
        self._has_work = bool(self.running or self.waiting)
        if self.feeds.iterations.feed.is_wanted:
            self.feeds.iterations.note(self, plan, result, now)
        return outputs

    # ---- what can be seen from outside

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, those included that wait for their siblings' prompt."""
        return len(self.waiting) + len(self.groups)

    @property
    def num_unfinished(self) -> int:
        """Sequences that are still to be computed, wherever they are."""
        return self.num_waiting + len(self.running) + len(self.preempted)

    @property
    def is_quiet(self) -> bool:
        """Whether the worker has nothing to do, and has been told who has left."""
        return not self.in_flight and not self.memory.slots.num_unclosed

    def num_unfinished_until(self, arrival: int) -> int:
        """How many of those who came no later than ``arrival`` are still to be computed."""
        return sum(each.arrival <= arrival for each in self._unfinished())

    def has_adapter_users(self, number: int) -> bool:
        """Whether anybody is still to be computed with that adapter."""
        return any(each.adapter == number for each in self._unfinished())

    def forget_adapter(self, number: int) -> None:
        """Nobody has that adapter any more, or will: its prefixes are of no use."""
        self.residency.forget(number)
        self.memory.prefix.drop(lambda namespace: namespace[1:2] == (adapter_word(number),))

    def adapters_in_use(self) -> tuple[set[int], set[int]]:
        """The adapters of those who run and of those who wait; 0 for none is among them."""
        running = self.running_adapters()
        waiting = itertools.chain(self.waiting, self.groups, self.preempted)
        return running, {each.adapter for each in waiting}

    def running_adapters(self) -> set[int]:
        """The adapters of those who hold slots, and 0 if any of them has none."""
        return {each.adapter for each in self.running}

    def requests_waiting_for(self, grammar: Grammar) -> list[Request]:
        """Return the requests that follow ``grammar`` and have a sequence without a slot."""
        waiting = (each.sequence for each in self._unfinished() if not each.holds_slot)
        return list(
            dict.fromkeys(each.request for each in waiting if each.sampler.grammar == grammar)
        )

    def await_compiling(self) -> None:
        """Have all sequences with a grammar wait until it is no longer in :attr:`uncompiled`."""
        grammars = (each.sequence.sampler.grammar for each in self._unfinished())
        self.uncompiled = {grammar: None for grammar in grammars if grammar is not None}

    def on_compiled(self, grammar: Grammar) -> None:
        """Let the sequences go on that follow ``grammar``: the worker has it."""
        del self.uncompiled[grammar]
        for each in self._unfinished():
            if each.sequence.sampler.grammar == grammar:
                each.left_grammar = False

    def _unfinished(self) -> Iterator[SequenceState]:
        lines = (self.waiting, self.groups, self.running, self.preempted)
        return itertools.chain.from_iterable(lines)

    def statistics(self) -> SchedulerStatistics:
        """A snapshot."""
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
    """The output of a sequence that ends without another token."""
    logprobs = None if sequence.request.params.logprobs is None else ()
    return SequenceOutput(sequence, logprobs=logprobs, finish=finish)
