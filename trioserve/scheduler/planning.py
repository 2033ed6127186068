"""Planning: the rows and admissions of the worker's next step."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve.protocol import wire
from trioserve.requests.request import Request, State
from trioserve.scheduler import policy
from trioserve.scheduler.drafts import plan_drafts
from trioserve.scheduler.plan_builder import PlanBuilder
from trioserve.scheduler.prefix_tree import PrefixMatch
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState
from trioserve.scheduler.token_counts import Ints

MAX_PENDING = 8
"""Sequences that one plan may skip because this very plan computes their prefix."""


@attrs.define(eq=False)
class Planner:
    """The planning of a scheduler's steps."""

    _state: SchedulerState

    def next_plan(self, now: float) -> wire.Plan | None:
        """Return the worker's next plan; None if there is nothing to do or enough is in flight."""
        state, limits, memory = self._state, self._state.limits, self._state.memory
        state.now = now
        if not state.has_worker or len(state.in_flight) >= limits.max_plans_in_flight:
            return None
        memory.advance(now)
        builder = PlanBuilder(state.next_number, limits.max_num_batched_tokens)
        if state.fault_isolation.restricts:
            self._preempt_non_suspects()
        if not state.pause_gate.is_closed:
            self._plan_running(builder)
            self._plan_admissions(builder, now)
            state.groups.release()
            if limits.max_row_tokens > 1:
                plan_drafts(builder, memory, limits.max_row_tokens)
        closed, copies = memory.slots.take_unclosed(), memory.prefix.take_copies()
        built = builder.build(closed, copies, memory.counts)
        if built is None:
            return None
        plan, in_flight = built
        state.in_flight.append(in_flight)
        state.next_number += 1
        return plan

    def _preempt_non_suspects(self) -> None:
        """Preempt every running sequence outside the probation group."""
        may_run = self._probation_rule()
        for seq_state in list(self._state.running):
            if not may_run(seq_state.sequence.request):
                self._state.preempt(seq_state)

    def _probation_rule(self) -> Callable[[Request], bool]:
        """Return a predicate for the requests that may be computed while there are suspects.

        If all requests of the probation group wait for a grammar, requests that aren't suspects run
        meanwhile.
        """
        fault_isolation = self._state.fault_isolation
        if self._state.uncompiled:
            suspects = set(fault_isolation.suspects)
            group = [request for request in fault_isolation.probation if request in suspects]
            if all(each.sequences[0].sampler.grammar in self._state.uncompiled for each in group):
                return lambda request: request not in suspects
        return fault_isolation.may_run

    def _plan_running(self, builder: PlanBuilder) -> None:
        """Give the running sequences their tokens."""
        counts, slots = self._state.memory.counts, self._state.running.slots
        if not len(slots):
            return
        length, planned = counts.length[slots], counts.planned[slots]
        may_run = length < counts.limit[slots]
        if self._state.limits.max_row_tokens > 1:
            may_run &= ~counts.unsettled[slots]
        share = policy.Share.divide(
            length - planned,
            may_run,
            builder.budget,
            self._state.limits.max_prompt_tokens_beside_decodes,
        )
        chunks = [(self._state.running[place], count) for place, count in share.chunks]
        # A running sequence has pages for its whole prompt, so only decodes need more.
        need_page = share.decodes[planned[share.decodes] >= counts.room[slots[share.decodes]]]
        if len(need_page) <= self._state.memory.num_available:
            for seq_state in self._state.running.at(need_page):
                self._allocate_page(seq_state, builder)
            steady = counts.decodes[slots[share.decodes]]
            self._decode(share.decodes[steady], builder)
            last_of_prompt = self._state.running.at(share.decodes[~steady])
            chunks = [*((each, 1) for each in last_of_prompt), *chunks]
        else:
            self._decode_one_by_one(self._state.running.at(share.decodes), builder)
        for seq_state, count in chunks:
            if seq_state.holds_slot:
                self._compute(seq_state, count, builder)
        builder.budget = min(builder.budget, share.left)

    def _decode(self, places: Ints, builder: PlanBuilder) -> None:
        """Add a row of one token for each sequence at ``places``: decodes with a page for it."""
        slots = self._state.running.slots[places]
        builder.add_decodes(
            self._state.running.at(places), slots, self._state.memory.counts.planned[slots]
        )
        self._state.memory.counts.advance(slots, builder.number)

    def _decode_one_by_one(self, decodes: list[SequenceState], builder: PlanBuilder) -> None:
        """Add the rows of ``decodes`` one at a time, preempting where pages run out.

        A sequence that is preempted on the way gets no row.
        """
        for seq_state in decodes:
            if seq_state.holds_slot and (
                self._state.memory.has_page_for_next(seq_state)
                or self._allocate_page(seq_state, builder)
            ):
                self._compute(seq_state, 1, builder)

    def _allocate_page(self, seq_state: SequenceState, builder: PlanBuilder) -> bool:
        """Append a page to the block table, preempting the youngest sequences if necessary.

        Return False if the sequence gets no row in this plan: either results in flight will free
        enough pages, or it was the youngest itself and has been preempted.
        """
        while (page := self._state.memory.append_page(seq_state)) is None:
            if self._state.memory.pool.num_retiring:
                return False
            victim = policy.choose_victim(list(self._state.running))
            self._preempt_for_pages(victim)
            if victim is seq_state:
                return False
        builder.append_page(seq_state, page)
        return True

    def _plan_admissions(self, builder: PlanBuilder, now: float) -> None:
        """Admit waiting sequences in the order of turns until one doesn't fit.

        Some sequences are skipped without stopping those behind them. A sequence is skipped if this
        very plan computes its prefix: the next plan can give it those pages instead of computing
        them again. A preempted sequence is skipped until the worker certainly has its grammar. A
        sequence that waits for an adapter stops only others with an adapter. Nothing is admitted
        before the sequences just preempted are back at the front of the queue.
        """
        if not self._state.waiting:
            self._state.residency.clear_places()
            return
        if self._state.preempted or not self._has_room(builder):
            return
        num_pending = 0
        adapters = self._state.residency.begin_pass(self._state.running_adapters)
        for seq_state in policy.admission_order(
            self._state.limits.scheduling_policy,
            self._state.waiting.in_turn(self._entry_rule()),
            lambda waiting: len(self._state.memory.match(waiting, builder.number).nodes),
        ):
            if not adapters.admits(seq_state.adapter):
                continue
            match = self._state.memory.match(seq_state, builder.number)
            if match.pending:
                num_pending += 1
                if num_pending == MAX_PENDING:
                    return
                continue
            if not self._state.memory.fits(seq_state, match, self._state.running.slots):
                return
            grammar = seq_state.sequence.sampler.grammar
            if grammar is not None and seq_state.left_grammar:
                self._state.uncompiled[grammar] = None
                continue
            self._open(seq_state, match, builder, now)
            if not self._has_room(builder):
                return

    def _entry_rule(self) -> Callable[[SequenceState], bool]:
        """Return a predicate for the waiting sequences that may be admitted now."""
        uncompiled = self._state.uncompiled
        restricts = self._state.fault_isolation.restricts
        may_run = self._probation_rule() if restricts else lambda request: True

        def may_enter(seq_state: SequenceState) -> bool:
            sequence = seq_state.sequence
            return (
                self._state.pause_gate.admits(seq_state.arrival)
                and may_run(sequence.request)
                and not (uncompiled and sequence.sampler.grammar in uncompiled)
            )

        return may_enter

    def _has_room(self, builder: PlanBuilder) -> bool:
        """Return True if one more sequence may run: a slot is free, and a token is left for it.

        So there are never more running sequences than tokens in a plan.
        """
        return builder.may_open and self._state.memory.slots.num_free > 0

    def _open(
        self, seq_state: SequenceState, match: PrefixMatch, builder: PlanBuilder, now: float
    ) -> None:
        """Move a waiting sequence into a slot, and give it its first row."""
        self._state.memory.enter(seq_state, match)
        self._state.counters.prefix_cache_queries += seq_state.length
        self._state.counters.prefix_cache_hits += seq_state.computed
        self._state.waiting.admit(seq_state, self._state.running)
        self._state.count_waiting(seq_state.sequence, -1)
        self._state.running.add(seq_state)
        self._state.move(seq_state.sequence, State.PREFILL)
        request = seq_state.sequence.request
        if request.times.first_scheduled is None:
            request.times.first_scheduled = now
            request.num_cached_tokens = seq_state.computed
        builder.open(seq_state)
        self._compute(seq_state, min(seq_state.remaining, builder.budget), builder)

    def _compute(self, seq_state: SequenceState, count: int, builder: PlanBuilder) -> None:
        """Add a row of ``count`` tokens."""
        samples = count == seq_state.remaining
        builder.add_row(seq_state, count, samples)
        seq_state.add_row(count, samples, builder.number)
        if seq_state.sequence.state is State.PREFILL:
            self._state.memory.publish(seq_state, builder.number)
            if samples:
                self._state.move(seq_state.sequence, State.DECODE)
                self._state.groups.on_prompt_planned(seq_state)

    def _preempt_for_pages(self, seq_state: SequenceState) -> None:
        """Preempt a sequence because another one needs its pages."""
        self._state.counters.num_preemptions += 1
        self._state.preempt(seq_state)
