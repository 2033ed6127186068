"""Requests that leave a worker once it has computed their prompts.

A sequence that is to be computed elsewhere gets its first token here, and no further row. When all
sequences of its request have come so far, the request moves to another worker
(:mod:`~trioserve.scheduler.moving`), which fetches its pages. If none can take it, it stays. The
other worker asks for the pages of each chunk while that is computed, and gets them with its end:
those of a long prompt come while the next chunk is computed, and those of the last one while the
request moves.
"""

from __future__ import annotations

from trioserve.requests.request import Request, Sequence, State
from trioserve.scheduler.state import SchedulerState


def hand_over(state: SchedulerState) -> None:
    """Move the requests on whose prompts are computed; let those stay that can't move."""
    for request in [each for each in state.leaving if _is_ready(state, each)]:
        del state.leaving[request]
        on_prefilled = state.feeds.on_prefilled
        if on_prefilled is None or not on_prefilled(request):
            stay(state, request)


def send_ahead(state: SchedulerState) -> None:
    """Let other workers fetch what the latest plan computes of prompts."""
    chunks, state.chunks = state.chunks, []
    if state.feeds.on_chunk is not None:
        for seq_state in chunks:
            state.feeds.on_chunk(seq_state)


def vacate(state: SchedulerState, request: Request) -> None:
    """Preempt the sequences of a request that no plan in flight names."""
    for sequence in request.all_sequences:
        if sequence.state is State.DECODE:
            state.preempt(sequence.seq_state)


def stay(state: SchedulerState, request: Request) -> None:
    """Compute the request here."""
    request.hands_over = False
    for sequence in request.all_sequences:
        if sequence.state is not State.FINISHED and sequence.seq_state.holds_slot:
            state.memory.counts.leaves[sequence.seq_state.slot] = False


def _is_ready(state: SchedulerState, request: Request) -> bool:
    oldest = state.in_flight[0].number if state.in_flight else state.next_number

    def has_stopped(sequence: Sequence) -> bool:
        if sequence.state is State.DECODE:
            return bool(sequence.seq_state.last_plan < oldest)
        return sequence.state in (State.WAITING, State.FINISHED)

    return all(map(has_stopped, request.all_sequences))
