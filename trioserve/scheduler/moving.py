"""Requests that move to another worker: taken out of one scheduler, and taken in by another.

A request moves with its tokens, which determine all that is computed next. A suspect of its
worker's death doesn't move, so that no request can end several workers. Until a death has been
judged, all requests that were in flight stay.
"""

from __future__ import annotations

import attrs

from trioserve.requests.request import Request, Sequence, State
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.fault_isolation import KillRecord
from trioserve.scheduler.limits import most_tokens
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState

FIRST_ARRIVAL = -(1 << 40)
"""Arrival number of the first request taken in: all of them count as older than any other."""
FIRST_TURN = 0
"""Turn of a sequence that had one elsewhere: it is in front of all others."""


@attrs.frozen
class Moving:
    """A request between two schedulers."""

    request: Request
    kills: dict[Sequence, KillRecord]
    """Records of kills at which its sequences were in flight."""
    held: set[Sequence]
    """Sequences that were held back."""


def movable(state: SchedulerCore) -> list[Request]:
    """Return the requests without a slot that may move, in the order of their turns."""
    suspects = {*state.fault_isolation.suspects, *state.recovery.unjudged}
    waiting = (each.sequence.request for each in state.waiting.in_turn())
    return [
        request
        for request in dict.fromkeys(waiting)
        if request not in suspects
        and all(each.state is State.WAITING for each in _unfinished(request))
    ]


def fits(state: SchedulerState, request: Request) -> bool:
    """Return True if the worker of ``state`` can run ``request`` to its limit."""
    limits, width = state.limits, request.params.beam_width
    room = min(limits.max_model_len, most_tokens(limits, len(request.prompt_ids), width))
    return width <= limits.max_num_seqs and all(
        each.seq_state.limit <= room for each in _unfinished(request)
    )


def take_out(state: SchedulerState, request: Request) -> Moving:
    """Take a movable request out."""
    held = {each for each in _unfinished(request) if each.seq_state.is_held}
    for sequence in _unfinished(request):
        queue = state.groups if sequence in held else state.waiting
        queue.remove(sequence.seq_state)
        state.count_waiting(sequence, -1)
    return Moving(request, state.fault_isolation.take_kills(request.all_sequences), held)


def take_in(state: SchedulerState, moving: Moving) -> None:
    """Queue a request that was taken out elsewhere, in front of those that had no turn."""
    request = moving.request
    state.fault_isolation.add_kills(moving.kills)
    state.num_taken_in += 1
    if request.beams is not None:
        request.beams.forget_results()
    for sequence in _unfinished(request):
        had_turn = sequence.seq_state.had_turn
        arrival = FIRST_ARRIVAL + state.num_taken_in
        seq_state = SequenceState.of(sequence, state.limits, arrival)
        if had_turn:
            priority, _, _, index = seq_state.order
            seq_state.order = (priority, FIRST_TURN, arrival, index)
        sequence.seq_state = seq_state
        if sequence.sampler.grammar is not None:
            state.uncompiled[sequence.sampler.grammar] = None
        state.count_waiting(sequence, 1)
        if request.beams is not None and sequence in moving.held:
            state.groups.hold_back(seq_state)
        else:
            state.groups.enter(seq_state)


def _unfinished(request: Request) -> list[Sequence]:
    return [each for each in request.all_sequences if each.state is not State.FINISHED]
