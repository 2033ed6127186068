"""Log-probabilities of given tokens: of prompts, and of the ids in ``logprob_token_ids``.

All are raw, from the unmodified logits. The hidden state at position p - 1 gives the
log-probability of the prompt's token p; the first token has none.

The logits of a whole prompt would take hundreds of megabytes, so they are computed and reduced in
slices of :data:`SLICE_BYTES`: on a GPU by :mod:`gpu.sampling.prompt_scores`, on a CPU by
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
"""Bytes of logits that exist at a time."""
_NOTHING = np.empty(0, dtype=np.float32)


@attrs.frozen(kw_only=True)
class PromptSpan:
    """Prompt tokens ``start`` to ``stop`` - 1 of one slot; a step gives their log-probabilities."""

    slot: Slot
    start: int
    stop: int
    first_hidden: int
    """Index of the step's hidden state that predicts the token at ``start``; the others follow."""


def prompt_piece(span: PromptSpan, arrays: Sequence[npt.NDArray[Any]]) -> PromptPiece:
    """Return the message for ``span``.

    ``arrays`` are, for P positions, K = ``prompt_logprobs`` (at most the vocabulary's size) and
    M = the number of ``logprob_token_ids``: log-probabilities [P] float32, ranks [P] int32, ids of
    the K most probable tokens [P, K] int32 (smaller id first among equals), their log-probabilities
    [P, K] float32, and those of ``logprob_token_ids`` [P, M] float32.
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
    """Return the most bytes of temporary memory for the log-probabilities of ``num_tokens``.

    That is a slice of logits, and less than twice as much for sort keys or exponentials.
    """
    return 3 * 4 * vocab_size * min(num_tokens, rows_in_a_slice(vocab_size))


def in_rows(
    num_rows: int, named: Mapping[int, Sequence[int]], values: npt.NDArray[np.float32]
) -> list[npt.NDArray[np.float32]]:
    """Return for each of ``num_rows`` rows the log-probabilities of its ids; empty if it has none.

    ``named`` has the ids by row, in the order of ``values``, whose rows may be padded.
    """
    lists = [_NOTHING] * num_rows
    for (row, ids), found in zip(named.items(), values, strict=True):
        lists[row] = found[: len(ids)]
    return lists


def rows_in_a_slice(vocab_size: int) -> int:
    """Return the number of rows of logits in a slice."""
    return max(SLICE_BYTES // (4 * vocab_size), 1)


def padded_ids(ids: Collection[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return at least one row of ids as an array [A, M], padded with zeros."""
    padded = np.zeros((len(ids), max(map(len, ids))), dtype=np.int64)
    for row, each in zip(padded, ids, strict=True):
        row[: len(each)] = each
    return padded
