"""Rows of output tensors in a result: the check that none is missing, and the bound of a step's."""

from __future__ import annotations

from collections.abc import Iterable

from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.protocol.reports import CONTEXT_LOGITS
from trioserve.requests.request import Sequence, State
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.sequence_state import SequenceState

MAX_RUNNING_BYTES = wire.MAX_MESSAGE_BYTES // 2
"""Bytes of output tensors that running requests may have together, so that a step's rows fit into
its result.
"""


def check_tensors(
    message: wire.StepResult, plan: InFlight
) -> list[tuple[Sequence, wire.TensorPiece]]:
    """Return the rows that ``message`` has, with the sequences that gave them.

    Those of a sequence that has ended meanwhile may be missing, and are taken if they fit.

    Raises:
        WorkerLost: Rows that are due are missing, or there are some that weren't asked for.
    """
    given = {(piece.slot, piece.name): piece for piece in message.tensors}
    if len(given) != len(message.tensors):
        raise WorkerLost(f"result {message.number} has the same output tensor twice")
    found: list[tuple[Sequence, wire.TensorPiece]] = []
    for index in plan.wants_more.nonzero()[0].tolist():
        seq_state = plan.seq_states[index]
        sequence, tensors = seq_state.sequence, seq_state.sequence.request.tensors
        if tensors is None:
            continue
        own = tensors.due(sequence.index)
        for name in (*own, CONTEXT_LOGITS):
            piece = given.pop((int(plan.slots[index]), name), None)
            try:
                if piece is not None:
                    tensors.check(sequence.index, piece)
                    found.append((sequence, piece))
                if name in own and plan.samples[index] and sequence.state is not State.FINISHED:
                    tensors.check_end(sequence.index, name, piece, sequence.num_tokens)
            except ValueError as error:
                if sequence.state is not State.FINISHED:
                    raise WorkerLost(
                        f"the output tensors in result {message.number} are wrong: {error}"
                    ) from error
    if given:
        raise WorkerLost(f"result {message.number} has output tensors that weren't asked for")
    return found


def has_room_for_rows(seq_state: SequenceState, running: Iterable[SequenceState]) -> bool:
    """Return True if a step's result has room for the rows of ``seq_state`` and of ``running``."""
    own = seq_state.sequence.request
    if own.tensors is None:
        return True
    sizes = {own: own.tensors.num_bytes}
    for other in running:
        request = other.sequence.request
        if request.tensors is not None:
            sizes[request] = request.tensors.num_bytes
    return sum(sizes.values()) <= MAX_RUNNING_BYTES
