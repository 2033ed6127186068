"""Log-probabilities of given tokens: those of prompts, and those of ids that a request names.

All are raw, of the model's own distribution. A hidden state says what follows its token, so the
state at position p - 1 gives the log-probability of the prompt's token p; the first token has none.

The logits of a whole prompt would be hundreds of megabytes, so they are made and reduced in slices
of :data:`SLICE_BYTES`: on a GPU by :mod:`gpu.sampling.prompt_scores`, on a CPU by
:mod:`gpu.cpu.scores`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.slots import Slot
from trioserve.protocol.wire import PromptPiece, from_floats, from_ints

SLICE_BYTES = 64 << 20
"""Logits that exist at a time."""
_NOTHING = np.empty(0, dtype=np.float32)


@attrs.frozen(kw_only=True)
class PromptSpan:
    """Prompt tokens of one slot, at positions ``start`` to ``stop`` - 1, that a step reports on."""

    slot: Slot
    start: int
    stop: int
    first_hidden: int
    """Index of the step's hidden state that gives the token at ``start``; the others follow it."""


def prompt_piece(span: PromptSpan, arrays: Sequence[npt.NDArray[Any]]) -> PromptPiece:
    """Return the message about ``span`` with five arrays.

    With P positions, K of the slot's ``prompt_logprobs`` (at most the vocabulary's size) and M of
    its ``logprob_token_ids``: log-probabilities [P], ranks [P] int32, and of the most probable
    tokens, of which the smaller id comes first among equals, the ids [P, K] int32 and
    log-probabilities [P, K]; last the log-probabilities [P, M] of the ids asked for. Floats are
    float32.
    """
    logprobs, ranks, top_ids, top_logprobs, ids_logprobs = arrays
    return PromptPiece(
        slot=span.slot.number,
        start=span.start,
        logprobs=from_floats(logprobs),
        ranks=from_ints(ranks),
        top_ids=from_ints(top_ids),
        top_logprobs=from_floats(top_logprobs),
        ids_logprobs=from_floats(ids_logprobs),
    )


def peak_bytes(vocab_size: int, num_tokens: int) -> int:
    """Return what reporting on ``num_tokens`` allocates at a time, at most, besides the reports.

    That is a slice of logits, and for the keys of its parts or its exponentials less than twice
    as much.
    """
    return 3 * 4 * vocab_size * min(num_tokens, rows_in_a_slice(vocab_size))


def in_rows(
    num_rows: int, named: Mapping[int, Sequence[int]], values: npt.NDArray[np.float32]
) -> list[npt.NDArray[np.float32]]:
    """For each of ``num_rows`` rows the log-probabilities of its ids, if it has any.

    ``named`` has the ids of some rows, in the order of ``values``; rows of those may be longer.
    """
    lists = [_NOTHING] * num_rows
    for (row, ids), found in zip(named.items(), values, strict=True):
        lists[row] = found[: len(ids)]
    return lists


def rows_in_a_slice(vocab_size: int) -> int:
    """Return how many rows of logits exist at a time."""
    return max(SLICE_BYTES // (4 * vocab_size), 1)


def padded_ids(ids: Collection[Sequence[int]]) -> npt.NDArray[np.int64]:
    """[A, M]: A rows of ids, at least one, filled up with zeros."""
    padded = np.zeros((len(ids), max(map(len, ids))), dtype=np.int64)
    for row, each in zip(padded, ids, strict=True):
        row[: len(each)] = each
    return padded
