"""The scheduler's invariants, as assertions over its whole state.

1. A sequence is queued, or held back for its leader's prompt, exactly while it waits. It is running
   exactly while it holds a slot. It is neither only while it is preempted and a plan in flight
   names it. A held-back sequence has a leader that isn't held back and that has a prompt to
   compute, or it has no beam.
2. Every page is free, idle, retiring or held. The holders of a page are exactly the sequences that
   have it in their block tables, and the transfers to siblings. A page with several holders is
   published and at the same position in each table.
3. Counts are in order. Block tables are long enough for what was planned, and no longer than can
   ever be needed.
4. A plan in flight names every retiring slot and page. With nothing in flight and no running
   sequence, pages are held for siblings alone, and no slot is open.
"""

from __future__ import annotations

import collections
import itertools

from trioserve.requests.request import State
from trioserve.requests.tenants import TenantCounts
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.prefix_check import check_prefix_cache
from trioserve.scheduler.sequence_group import leader_of
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState


def check_state(state: SchedulerState) -> None:
    """Assert the invariants. The cost grows with the size of the state."""
    _check_queues(state)
    for seq_state in state.running:
        _check_counts(state, seq_state)
    _check_pages(state)
    _check_in_flight(state)
    state.fault_isolation.check()


def _check_queues(state: SchedulerState) -> None:
    for queue in (state.waiting, state.running):
        orders = [seq_state.order for seq_state in queue]
        assert orders == sorted(set(orders)), "a queue is out of order"
    state.waiting.check()
    for seq_state in state.waiting:
        assert seq_state.sequence.state is State.WAITING
        assert seq_state.sequence.seq_state is seq_state
        assert not seq_state.holds_slot
        assert not seq_state.pages
        assert not seq_state.is_held
    _check_held(state)
    waiting = [each.sequence for each in itertools.chain(state.waiting, state.groups)]
    tokens = sum(sequence.num_tokens for sequence in waiting)
    assert state.num_waiting_tokens == tokens, "waiting tokens are miscounted"
    tenants = TenantCounts()
    for sequence in waiting:
        tenants.add(sequence.request.tenant, 1, sequence.num_tokens)
    assert state.waiting_of_tenants == tenants, "tenants' sequences are miscounted"
    for seq_state in state.running:
        assert seq_state.sequence.state in (State.PREFILL, State.DECODE)
        assert seq_state.sequence.seq_state is seq_state
    for seq_state in state.preempted:
        assert seq_state.sequence.state is State.PREEMPTED
        assert seq_state.sequence.seq_state is seq_state
        assert seq_state.last_plan >= state.in_flight[0].number, "it should be queued again"
    slots = [seq_state.slot for seq_state in state.running]
    assert len(set(slots)) == len(slots), "two sequences share a slot"
    table = state.memory.slots
    assert len(slots) + table.num_free + table.num_retiring == table.num_slots, "a slot is lost"


def _check_held(state: SchedulerState) -> None:
    queued = set(map(id, state.waiting))
    assert len(state.groups) == len(list(state.groups)), "sequences held back are miscounted"
    for seq_state in state.groups:
        assert seq_state.is_held
        assert id(seq_state) not in queued
        assert seq_state.sequence.state is State.WAITING
        assert seq_state.sequence.seq_state is seq_state
        assert not seq_state.holds_slot
        leader = leader_of(seq_state.sequence.request)
        assert leader is not None, "a sequence is held back without a leader"
        if leader.request.beams is None:
            assert not leader.seq_state.is_held, "a leader is held back"
        waits = leader.state in (State.WAITING, State.PREFILL, State.PREEMPTED)
        is_beam = leader.request.beams is not None
        assert waits or is_beam or leader.max_tokens == 0, (
            "a sequence is held back for a computed prompt"
        )


def _check_counts(state: SchedulerState, seq_state: SequenceState) -> None:
    assert seq_state.computed <= seq_state.planned < seq_state.length <= seq_state.limit
    limits = state.limits
    num_pages = len(seq_state.pages)
    assert limits.pages_for(seq_state.planned) <= num_pages <= limits.pages_for(seq_state.limit)
    known = seq_state.sequence.num_tokens
    in_flight = sum(
        samples for plan in state.in_flight for row, _, samples in plan.rows if row is seq_state
    )
    group = seq_state.sequence.request.beams
    waits = group is not None and group.waits(seq_state.sequence)
    assert seq_state.length == known + in_flight + waits, "a token is counted twice or not at all"
    unsettled = bool(state.memory.counts.unsettled[seq_state.slot])
    if group is not None:
        assert unsettled or not (in_flight or waits), (
            "a beam goes on before its next token is known"
        )
        return
    if state.limits.num_stages > 1:
        assert unsettled == bool(in_flight), "a row isn't told from others that may go on"
        assert in_flight <= 1, "a row comes before the token that it needs"
        return
    ragged = [plan for plan in state.in_flight if _may_bring_several(plan, seq_state)]
    assert unsettled == bool(ragged), "an unsettled length isn't told from others"
    if ragged:
        assert seq_state.last_plan == ragged[0].number, "a row follows one of unknown length"
    if seq_state.sequence.state is State.DECODE:
        assert seq_state.remaining == 1


def _may_bring_several(plan: InFlight, seq_state: SequenceState) -> bool:
    if plan.limits is None:
        return False
    limits = zip(plan.seq_states, plan.limits.tolist(), strict=True)
    return any(limit > 1 for each, limit in limits if each is seq_state)


def _check_pages(state: SchedulerState) -> None:
    pool, prefix = state.memory.pool, state.memory.prefix
    pool.check()
    check_prefix_cache(prefix)
    places: dict[int, set[int]] = collections.defaultdict(set)
    holders = collections.Counter(state.memory.lending.held)
    for seq_state in state.running:
        assert len(set(seq_state.pages)) == len(seq_state.pages)
        holders.update(seq_state.pages)
        for place, page in enumerate(seq_state.pages):
            places[page].add(place)
    unknown = pool.held() - holders.keys()
    assert not unknown, f"page {min(unknown)} has an unknown holder"
    for page, number in holders.items():
        assert pool.holders(page) == number, f"page {page} has an unknown holder"
        if number > 1:
            assert pool.is_kept(page), f"page {page} is shared and not published"
            assert len(places[page]) <= 1, f"page {page} stands at two places"


def _check_in_flight(state: SchedulerState) -> None:
    numbers = [plan.number for plan in state.in_flight]
    assert numbers == list(range(state.next_number - len(numbers), state.next_number))
    assert len(numbers) <= state.limits.max_plans_in_flight
    for plan in state.in_flight:
        rows = [seq_state for seq_state, _, _ in plan.rows]
        assert len(set(map(id, rows))) == len(rows), "two rows of one sequence"
    rows_in_flight = itertools.chain.from_iterable(plan.rows for plan in state.in_flight)
    for seq_state, _, _ in rows_in_flight:
        assert seq_state.last_plan >= numbers[0]
        assert seq_state.sequence.state is not State.WAITING, "queued again too early"
    if not numbers and not state.running:
        pool, slots = state.memory.pool, state.memory.slots
        num_lent = len(state.memory.lending.held)
        assert pool.num_held == num_lent, "pages are held while nothing runs"
        assert slots.num_free == slots.num_slots, "slots are open while nothing runs"
