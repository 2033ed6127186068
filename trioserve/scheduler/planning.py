"""Planning: the worker's next step, decodes first unless a burst of prompts holds them."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from trioserve.protocol import wire
from trioserve.requests.request import Request
from trioserve.scheduler import policy
from trioserve.scheduler.beams import Beams
from trioserve.scheduler.decode_hold import BRIEF, FEW, LONGEST
from trioserve.scheduler.drafts import plan_drafts
from trioserve.scheduler.micro_batches import most_in_flight, share_of
from trioserve.scheduler.plan_builder import PlanBuilder
from trioserve.scheduler.prompt_planning import PromptPlanner
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState
from trioserve.scheduler.token_counts import Ints

LOAD_NOTED = 16
"""Plans after which the load is noted even if it has changed by the tokens of decodes only."""


@attrs.define(eq=False)
class Planner:
    """The planning of a scheduler's steps."""

    _state: SchedulerState
    _beams: Beams
    _prompts: PromptPlanner = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._prompts = PromptPlanner(self._state)

    def next_plan(self, now: float) -> wire.Plan | None:
        """Return the worker's next plan; None if there is nothing to do or enough is in flight."""
        state, limits, memory = self._state, self._state.limits, self._state.memory
        state.now = now
        if not state.has_worker or len(state.in_flight) >= self._most_in_flight():
            return None
        memory.advance(now)
        builder = PlanBuilder(state.next_number, limits.max_num_batched_tokens)
        if state.fault_isolation.restricts:
            self._preempt_non_suspects()
        if not state.pause_gate.is_closed:
            self._plan_rows(builder, now)
            state.groups.release()
            if limits.max_row_tokens > 1:
                plan_drafts(builder, memory, limits.max_row_tokens)
        closed, copies = memory.slots.take_unclosed(), memory.take_copies(builder.number)
        built = builder.build(closed, memory.take_cuts(), copies, memory.counts)
        if built is None:
            return None
        plan, in_flight = built
        state.in_flight.append(in_flight)
        state.next_number += 1
        if in_flight.load.prompt_tokens or not in_flight.number % LOAD_NOTED:
            state.feeds.note_load()
        return plan

    def _most_in_flight(self) -> int:
        limits = self._state.limits
        decodes = any(plan.load.decodes for plan in self._state.in_flight)
        return most_in_flight(limits.max_plans_in_flight, limits.num_stages, decodes=decodes)

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

    def _plan_rows(self, builder: PlanBuilder, now: float) -> None:
        """Add the rows of decodes and of prompts, or of prompts alone while decodes are held."""
        self._make_pages_for_stale()
        decodes, prefills = self._split_running()
        may_enter = self._entry_rule()
        most = self._longest_hold(decodes, prefills, may_enter, builder.number, now)
        holds = most > 0
        if holds:
            steady = self._state.memory.counts.decodes[self._state.running.slots[decodes]]
            prompts = [*prefills, *self._state.running.at(decodes[~steady])]
            self._prompts.plan(prompts, may_enter, builder, now)
            holds = builder.num_rows > 0  # false if no prompt can be computed yet
        if not holds:
            self._plan_decodes(decodes, builder)
            self._plan_beams(builder, may_enter)
            prefills = [each for each in prefills if each.holds_slot]
            self._prompts.plan(prefills, may_enter, builder, now)
        if holds:
            self._state.decode_hold.note_hold(self._streams(decodes), now, most)
        else:
            self._state.decode_hold.note_step(builder.load.decodes, now)
        if not (builder.num_rows or self._state.in_flight) and self._state.running:
            self._beams.make_room(may_enter)

    def _split_running(self) -> tuple[Ints, list[SequenceState]]:
        """Return the places of the sequences to decode, and the sequences in prefill."""
        counts, running = self._state.memory.counts, self._state.running
        slots, num_stages = running.slots, self._state.limits.num_stages
        length, planned = counts.length[slots], counts.planned[slots]
        waits = counts.unsettled[slots] | (counts.decodes[slots] & counts.leaves[slots])
        goes_on = length < counts.limit[slots]
        decodes, prefills = policy.split_running(length - planned, goes_on & ~waits)
        if num_stages > 1:
            num_decoding = int(np.count_nonzero(goes_on & (length - planned == 1)))
            last_plans = counts.last_plan[slots[decodes]]
            decodes = decodes[share_of(last_plans, num_decoding, num_stages)]
        return decodes, running.at(prefills)

    def _longest_hold(
        self,
        decodes: Ints,
        prefills: list[SequenceState],
        may_enter: Callable[[SequenceState], bool],
        plan: int,
        now: float,
    ) -> float:
        """Return the most seconds of a hold of decodes in this plan, 0 if they aren't held.

        Streams from before the burst are held for few. None are held if a target for gaps or
        priorities are given, because a hold would ignore them, while suspects are examined, or if
        other stages decode meanwhile.
        """
        state, limits = self._state, self._state.limits
        if limits.num_stages > 1:
            return 0
        if limits.itl_target is not None or limits.scheduling_policy == "priority":
            return 0
        if state.fault_isolation.restricts or not len(decodes):
            return 0
        streams = self._streams(decodes)
        if not state.decode_hold.is_possible(streams):
            return 0
        prompts = self._prompts.works(prefills, may_enter, plan, now)
        if not prompts:
            return 0
        ran = any(len(each.sequence.output_ids) > FEW for each in state.running.at(decodes))
        most = BRIEF if ran else LONGEST
        return (
            most if state.decode_hold.is_due(state.step_times, prompts, streams, now, most) else 0
        )

    def _streams(self, decodes: Ints) -> Ints:
        """Return numbers of the sequences at places ``decodes``, which no others ever have."""
        slots = self._state.running.slots[decodes]
        generations: Ints = self._state.memory.counts.generation[slots]
        return generations * self._state.limits.max_num_seqs + slots

    def _plan_decodes(self, decodes: Ints, builder: PlanBuilder) -> None:
        """Give each decoding sequence its row."""
        counts, running = self._state.memory.counts, self._state.running
        slots = running.slots
        planned = counts.planned[slots]
        # A running sequence has pages for its whole prompt, so only decodes need more.
        need_page = decodes[planned[decodes] >= counts.room[slots[decodes]]]
        if len(need_page) <= self._state.memory.num_available:
            for seq_state in running.at(need_page):
                self._append_page(seq_state, builder)
            steady = counts.decodes[slots[decodes]]
            last_of_prompt = running.at(decodes[~steady])
            self._decode(decodes[steady], builder)
            for seq_state in last_of_prompt:
                self._prompts.compute(seq_state, 1, builder)
        else:
            self._decode_one_by_one(running.at(decodes), builder)

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
                or self._append_page(seq_state, builder)
            ):
                self._prompts.compute(seq_state, 1, builder)

    def _make_pages_for_stale(self) -> None:
        """Append the pages that beams with another last token than the worker's need.

        It comes first in a plan: a slot that has a row, or that is opened, can't be preempted.
        """
        for seq_state in self._beams.stale():
            if seq_state.holds_slot and not self._state.memory.has_page_for_next(seq_state):
                self._allocate_page(seq_state)

    def _plan_beams(self, builder: PlanBuilder, may_enter: Callable[[SequenceState], bool]) -> None:
        """Add the rows of beams that the worker must be told of: forks, and those with another last
        token than it has drawn.
        """
        for seq_state in self._beams.enter_forks(builder, may_enter):
            self._prompts.compute(seq_state, 1, builder)
        for seq_state in self._beams.stale():
            if self._state.memory.has_page_for_next(seq_state):
                self._beams.reopen(seq_state, builder)
                self._prompts.compute(seq_state, 1, builder)

    def _append_page(self, seq_state: SequenceState, builder: PlanBuilder) -> bool:
        """Append a page to the block table, as :meth:`_allocate_page` does, and tell the worker."""
        page = self._allocate_page(seq_state)
        if page is not None:
            builder.append_page(seq_state, page)
        return page is not None

    def _allocate_page(self, seq_state: SequenceState) -> int | None:
        """Append a page to the block table. Take those of refused drafts, and preempt the youngest
        sequences, if necessary.

        Return None if the sequence gets no row in this plan: either results in flight will free
        enough pages, or it was the youngest itself and has been preempted.
        """
        memory, running = self._state.memory, self._state.running
        while (page := memory.append_page(seq_state)) is None:
            if memory.take_back_spare(running, self._state.next_number):
                continue
            if memory.pool.num_retiring:
                return None
            victim = policy.choose_victim(list(running))
            self._preempt_for_pages(victim)
            if victim is seq_state:
                return None
        return page

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

    def _preempt_for_pages(self, seq_state: SequenceState) -> None:
        """Preempt a sequence because another one needs its pages."""
        self._state.counters.num_preemptions += 1
        self._state.preempt(seq_state)
