"""Planning of prompts: the order and the tokens of sequences in prefill, and admissions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs

from trioserve.requests.embedded import count_uncut
from trioserve.requests.request import State
from trioserve.scheduler import policy
from trioserve.scheduler.adapter_residency import Pass
from trioserve.scheduler.plan_builder import PlanBuilder
from trioserve.scheduler.prefix_tree import PrefixMatch
from trioserve.scheduler.prompt_share import PromptWork, response_ratio, tokens_alone, tokens_beside
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState, has_room
from trioserve.scheduler.tensor_pieces import has_room_for_rows

MAX_PENDING = 8
"""Sequences that one plan may skip because their prefix is being computed."""
WINDOW = 64
"""Waiting sequences that a plan puts into order; each costs some microseconds."""


@attrs.define(eq=False)
class PromptPlanner:
    """The planning of prompts in one scheduler's steps."""

    _state: SchedulerState

    def plan(
        self,
        prefills: Sequence[SequenceState],
        may_enter: Callable[[SequenceState], bool],
        builder: PlanBuilder,
        now: float,
    ) -> None:
        """Add rows of prompts, and admit waiting sequences.

        Args:
            prefills: Running sequences that have tokens of their prompts left.
            may_enter: Returns True if a waiting sequence may be admitted now.
            builder: The plan, with the rows of all decodes.
            now: Time on trio's clock.
        """
        admissions = self._begin_admissions(prefills, builder, now)
        waiting = self._waiting(may_enter, builder.number) if admissions else iter(())
        window = list(itertools.islice(waiting, WINDOW))
        prompts = {
            id(each): self._prompt(each, builder.number, now) for each in (*prefills, *window)
        }

        # Sequences around a preempted one keep the places that they have because of it.
        is_lpm = self._state.limits.scheduling_policy == "lpm"
        keeps_place = is_lpm or any(each.had_turn for each in window)

        def candidate(each: SequenceState) -> policy.Candidate[SequenceState]:
            ratio = response_ratio(self._state.step_times, prompts[id(each)])
            tenant = None if keeps_place else each.sequence.request.tenant
            return policy.Candidate(each, each.order[0], ratio, tenant)

        order = policy.prompt_order(map(candidate, prefills), map(candidate, window))
        if not order:
            return
        self._limit(builder, [prompts[id(each)] for each in order])
        for seq_state in itertools.chain(order, waiting):
            if builder.budget <= 0:
                return
            if seq_state.holds_slot:
                if seq_state.last_plan != builder.number:  # another one's prefix, computed earlier
                    self.compute_next(seq_state, builder)
            elif admissions and not admissions.is_over:
                self._admit(seq_state, admissions, builder)

    def works(
        self,
        prefills: Sequence[SequenceState],
        may_enter: Callable[[SequenceState], bool],
        plan: int,
        now: float,
    ) -> list[PromptWork]:
        """Return the work of the prompts in prefill and of those that wait, up to a window."""
        waiting = itertools.islice(self._waiting(may_enter, plan), WINDOW)
        return [self._prompt(each, plan, now) for each in (*prefills, *waiting)]

    def _prompt(self, seq_state: SequenceState, plan: int, now: float) -> PromptWork:
        request = seq_state.sequence.request
        waited = max(now - request.times.arrived, 0.0)
        if seq_state.holds_slot:
            skipped = min(request.num_cached_tokens or 0, seq_state.planned)
            context, remaining = seq_state.planned, seq_state.remaining
        else:
            expected = seq_state.expected_cached
            skipped = context = (
                self._expect_cached(seq_state, plan) if expected is None else expected
            )
            remaining = seq_state.sequence.num_tokens - context
        return PromptWork(remaining=remaining, context=context, skipped=skipped, waited=waited)

    def _expect_cached(self, seq_state: SequenceState, plan: int) -> int:
        """Note and return the number of its tokens that the prefix cache has."""
        nodes = self._state.memory.match(seq_state, plan).nodes
        seq_state.expected_cached = len(nodes) * self._state.limits.page_size
        return seq_state.expected_cached

    def _limit(self, builder: PlanBuilder, prompts: Sequence[PromptWork]) -> None:
        """Limit the plan's budget by the time of its step."""
        model, load = self._state.step_times, builder.load
        if self._state.limits.num_stages > 1:
            # The streams that other stages decode now wait for this plan, too.
            decodes = [plan.load.decodes for plan in self._state.in_flight]
            load = attrs.evolve(load, decodes=max(load.decodes, *decodes, 0))
        if not load.decodes:
            builder.budget = int(min(builder.budget, tokens_alone(model, prompts)))
        elif model.is_known:
            target = self._state.limits.itl_target
            most = tokens_beside(model, prompts, model.predict(load), target)
            builder.budget = min(builder.budget, most)

    # ---- admissions

    def _begin_admissions(
        self, prefills: Sequence[SequenceState], builder: PlanBuilder, now: float
    ) -> Admissions | None:
        """Return a pass over the waiting sequences; None if none can be admitted.

        None is admitted before the sequences just preempted are back at the front of the queue.
        """
        residency = self._state.residency
        if not self._state.waiting:
            residency.clear_places()
            return None
        if self._state.preempted or not has_room(self._state, builder):
            return None
        return Admissions(residency.begin_pass(self._state.running_adapters), prefills, now)

    def _waiting(
        self, may_enter: Callable[[SequenceState], bool], plan: int
    ) -> Iterator[SequenceState]:
        """Return the waiting sequences in the order of admission."""
        return policy.admission_order(
            self._state.limits.scheduling_policy,
            self._state.waiting.in_turn(may_enter),
            lambda waiting: self._expect_cached(waiting, plan),
            lambda waiting: waiting.had_turn,
        )

    def _admit(
        self, seq_state: SequenceState, admissions: Admissions, builder: PlanBuilder
    ) -> None:
        """Admit a waiting sequence, or skip it, or end the admissions because it doesn't fit.

        A sequence is skipped if its prefix is being computed: a later plan can give it those pages
        instead of computing them again. So is one whose pages are fetched. A preempted
        sequence is skipped until the worker certainly has its grammar. A sequence that waits for an
        adapter stops only others with an adapter, and one that waits for the room for its output
        tensors stops only others with any.
        """
        if not admissions.adapters.admits(seq_state.adapter):
            return
        match = self._state.memory.match(seq_state, builder.number)
        other = self._computing_prefix(seq_state, match, admissions.prefills)
        if other is not None and other.last_plan != builder.number:
            # It takes the place of this sequence in the order, which is earlier than its own.
            self.compute_next(other, builder)
        if match.pending or other is not None:
            admissions.num_pending += 1
            admissions.is_over = admissions.num_pending == MAX_PENDING
            return
        if self._state.memory.waits_for_pages(seq_state, match, self._state.step_times):
            return
        if seq_state.sequence.request.tensors is not None:
            admissions.rows_are_over |= not has_room_for_rows(seq_state, self._state.running)
            if admissions.rows_are_over:
                return
        start = len(match.nodes) * self._state.limits.page_size
        if not _count_next(seq_state, start, seq_state.sequence.num_tokens - start, builder):
            return
        if not self._state.memory.fits(seq_state, match, self._state.running.slots):
            admissions.is_over = True
            return
        grammar = seq_state.sequence.sampler.grammar
        if grammar is not None and seq_state.left_grammar:
            self._state.uncompiled[grammar] = None
            return
        self._open(seq_state, match, builder, admissions.now)
        admissions.is_over = not has_room(self._state, builder)

    def _computing_prefix(
        self, seq_state: SequenceState, match: PrefixMatch, prefills: Sequence[SequenceState]
    ) -> SequenceState | None:
        """Return the sequence in prefill that is about to compute the next page of the prefix.

        It is None if there is none.
        """
        size = self._state.limits.page_size
        start = len(match.nodes) * size
        is_last = start + size >= seq_state.sequence.num_tokens  # computed in any case
        if match.pending or seq_state.namespace is None or is_last:
            return None
        node = match.nodes[-1] if match.nodes else None
        tokens = seq_state.known_tokens()[start : start + size]
        for other in prefills:
            if (
                other.holds_slot
                and other.sequence.state is State.PREFILL
                and other.cursor is node
                and other.namespace == seq_state.namespace
                and other.known_tokens()[start : start + size] == tokens
            ):
                return other
        return None

    def _open(
        self, seq_state: SequenceState, match: PrefixMatch, builder: PlanBuilder, now: float
    ) -> None:
        """Move a waiting sequence into a slot, and give it its first row."""
        self._state.memory.enter(seq_state, match)
        self._state.counters.prefix_cache_queries += seq_state.length
        self._state.counters.prefix_cache_hits += seq_state.cached
        self._state.admit(seq_state)
        request = seq_state.sequence.request
        if request.times.first_scheduled is None:
            request.times.first_scheduled = now
            request.num_cached_tokens = seq_state.cached
        builder.open(seq_state)
        self.compute_next(seq_state, builder)

    # ---- rows

    def compute_next(self, seq_state: SequenceState, builder: PlanBuilder) -> None:
        """Add a row of as many tokens as the sequence has left, within the plan's budget.

        There is none if the next tokens come together and don't fit.
        """
        count = _count_next(seq_state, seq_state.planned, seq_state.remaining, builder)
        if count:
            self.compute(seq_state, count, builder)

    def compute(self, seq_state: SequenceState, count: int, builder: PlanBuilder) -> None:
        """Add a row of ``count`` tokens."""
        samples = count == seq_state.remaining
        builder.add_row(seq_state, count, samples)
        seq_state.add_row(count, samples, builder.number)
        if seq_state.sequence.state is State.PREFILL:
            self._state.memory.publish(seq_state, builder.number)
            hands_over = seq_state.sequence.request.hands_over
            if hands_over and seq_state.sequence.max_tokens > 1:
                self._state.chunks.append(seq_state)
            if samples:
                self._state.move(seq_state.sequence, State.DECODE)
                self._state.groups.on_prompt_planned(seq_state)
                if hands_over:
                    self._state.leaving[seq_state.sequence.request] = None


def _count_next(seq_state: SequenceState, start: int, remaining: int, builder: PlanBuilder) -> int:
    """Return the number of tokens from ``start`` on that a plan computes, of ``remaining``.

    The first prompt of a plan may exceed the budget for an image whose tokens come together, so
    that there is always progress.
    """
    is_first = not builder.load.prompt_tokens
    return count_uncut(
        seq_state.sequence.request.embedded,
        start,
        min(remaining, builder.budget),
        builder.room if is_first else builder.budget,
    )


@attrs.define(eq=False)
class Admissions:
    """The admissions of one plan."""

    adapters: Pass
    prefills: Sequence[SequenceState]
    """Sequences in prefill before the plan."""
    now: float
    num_pending: int = 0
    """Sequences that were skipped because their prefix is being computed."""
    rows_are_over: bool = False
    """True if this plan admits no more sequences with output tensors."""
    is_over: bool = False
    """True if this plan admits no more."""
