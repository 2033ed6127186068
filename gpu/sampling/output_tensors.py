"""Hidden states and logits that requests return; see :mod:`trioserve.requests.tensors`.

Hidden states, and logits of prompts, are spans of a step's hidden states. Logits of a generation
are copies of those that a token is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.prompt_logprobs import rows_in_a_slice
from gpu.slots import Row
from trioserve.protocol.reports import CONTEXT_LOGITS, GENERATION_LOGITS, HIDDEN_STATES
from trioserve.protocol.wire import TensorPiece, from_floats

Floats = npt.NDArray[np.float32]


@attrs.frozen(kw_only=True)
class TensorSpan:
    """A step's hidden states ``first_hidden`` to ``stop_hidden`` - 1, of one slot.

    They, or their logits if ``of_logits``, are rows of an output tensor, of the positions from
    ``start`` on.
    """

    slot: int
    of_logits: bool
    start: int
    first_hidden: int
    stop_hidden: int

    def slices(self, vocab_size: int) -> Iterator[tuple[int, int]]:
        """Return the hidden states whose logits are computed at a time: first, and behind last."""
        size = rows_in_a_slice(vocab_size)
        for first in range(self.first_hidden, self.stop_hidden, size):
            yield first, min(first + size, self.stop_hidden)


def spans_of(row: Row, last_hidden: int) -> Iterator[TensorSpan]:
    """Return the spans of ``row``, whose last hidden state is ``last_hidden`` of the step."""
    slot = row.slot
    for of_logits, first, stop in (
        (False, slot.states_from, row.end),
        (True, slot.context_logits_from, min(row.end, slot.prompt_length)),
    ):
        start = max(first, row.start)
        if first >= 0 and start < stop:
            yield TensorSpan(
                slot=slot.number,
                of_logits=of_logits,
                start=start,
                first_hidden=last_hidden + 1 - row.end + start,
                stop_hidden=last_hidden + 1 - row.end + stop,
            )


def tensor_piece(span: TensorSpan, rows: Floats) -> TensorPiece:
    """Return the message with the ``rows`` of ``span``, hidden states [n, E] or logits [n, V]."""
    name = CONTEXT_LOGITS if span.of_logits else HIDDEN_STATES
    return TensorPiece(slot=span.slot, name=name, start=span.start, rows=from_floats(rows))


def logits_piece(row: Row, logits: Floats) -> TensorPiece:
    """Return the message with the ``logits`` [V] that the token behind ``row`` is drawn from.

    The slot has the tokens before it.
    """
    return TensorPiece(
        slot=row.slot.number,
        name=GENERATION_LOGITS,
        start=row.end - 1,
        rows=from_floats(logits),
    )


def read_span(
    span: TensorSpan,
    hidden: Any,
    floats: Callable[[Any], Floats],
    logits: Callable[[Any], Floats],
    vocab_size: int,
) -> TensorPiece:
    """Return the message of ``span``.

    Args:
        span: which of ``hidden``.
        hidden: the step's hidden states.
        floats: returns hidden states as float32.
        logits: returns logits of hidden states, valid until it is called again.
        vocab_size: the model's.
    """
    if not span.of_logits:
        return tensor_piece(span, floats(hidden[span.first_hidden : span.stop_hidden]))
    rows = np.empty((span.stop_hidden - span.first_hidden, vocab_size), dtype=np.float32)
    for first, stop in span.slices(vocab_size):
        rows[first - span.first_hidden : stop - span.first_hidden] = logits(hidden[first:stop])
    return tensor_piece(span, rows)
