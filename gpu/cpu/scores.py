"""Log-probabilities of given tokens, by NumPy; see :mod:`gpu.sampling.prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cpu.model import Floats, Hidden
from gpu.sampling.prompt_logprobs import PromptSpan, padded_ids, rows_in_a_slice
from gpu.slots import Slot

Ids = npt.NDArray[np.int64]
Scores = tuple[Floats, npt.NDArray[np.int32], npt.NDArray[np.int32], Floats, Floats]


def score_prompt(
    span: PromptSpan, hidden: Hidden, logits_of: Callable[[Any], Floats], vocab_size: int
) -> list[npt.NDArray[np.generic]]:
    """Return what :func:`gpu.sampling.prompt_logprobs.prompt_piece` makes the message about
    ``span`` of.

    Args:
        span: which tokens.
        hidden: [T, E], the step's hidden states.
        logits_of: the model's logits [n, vocab_size] of n of them, valid until it is called again.
        vocab_size: the model's.
    """
    tokens = span.slot.tokens[span.start : span.stop]
    size = rows_in_a_slice(vocab_size)
    scored = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        first = span.first_hidden + start
        logits = logits_of(hidden[first : first + len(part)])
        scored.append(_score(logits, part.astype(np.int64), span.slot))
    return [np.concatenate(parts) for parts in zip(*scored, strict=True)]


def logprobs_of(
    logits: Floats, rows: npt.NDArray[np.integer], ids: Collection[Sequence[int]]
) -> Floats:
    """[A, M]: log-probabilities of ``ids[i]`` in row ``rows[i]`` of ``logits`` [R, V].

    There are A rows, at least one, each with at most M ids; what stands behind a row's last means
    nothing.
    """
    wanted = padded_ids(ids)
    # Row by row: what is made of one stays in the processor's cache.
    found = [
        _of_ids(logits[i : i + 1], _normalizers(logits[i : i + 1]), each[None])
        for i, each in zip(rows.tolist(), wanted, strict=True)
    ]
    return np.concatenate(found)


def _score(logits: Floats, tokens: Ids, slot: Slot) -> Scores:
    """:func:`score_prompt` for the ``tokens`` [n] of one slice with ``logits`` [n, V]."""
    normalizers = _normalizers(logits)
    chosen = np.take_along_axis(logits, tokens[:, None], axis=1)
    count = min(max(slot.sampler.prompt_logprobs, 0), logits.shape[1])
    top_ids = np.empty((len(tokens), count), dtype=np.int64)
    ranks = np.empty(len(tokens), dtype=np.int32)
    for i, row in enumerate(logits):
        ranks[i] = 1 + np.count_nonzero(row > chosen[i])
        top_ids[i] = _most_probable(row, count)
    top_logprobs = np.take_along_axis(logits, top_ids, axis=1) - normalizers
    ids = np.array([slot.sampler.logprob_token_ids] * len(tokens), dtype=np.int64)
    of_ids = _of_ids(logits, normalizers, ids)
    return (chosen - normalizers)[:, 0], ranks, top_ids.astype(np.int32), top_logprobs, of_ids


def _normalizers(logits: Floats) -> Floats:
    """[n, 1]: the logarithm of the sum of the exponentials of each row."""
    normalizers = np.empty((len(logits), 1), dtype=np.float32)
    with np.errstate(invalid="ignore"):  # where a logit is infinite there is no distribution: NaN
        for i, row in enumerate(logits):
            peak = row.max()
            normalizers[i] = peak + np.log(np.exp(row - peak).sum())
    return normalizers


def _of_ids(logits: Floats, normalizers: Floats, ids: Ids) -> Floats:
    """[n, M]: log-probabilities of ``ids`` [n, M]; ids past the vocabulary have -inf."""
    known = ids < logits.shape[1]
    values = np.take_along_axis(logits, np.where(known, ids, 0), axis=1) - normalizers
    return np.where(known, values, np.float32(-np.inf))


def _most_probable(row: Floats, count: int) -> Ids:
    """[count]: ids by falling logit, and by rising id among equals."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    least = np.partition(row, len(row) - count)[len(row) - count]
    # More than were asked for, where others equal the least; all of them, if that is NaN.
    candidates = np.flatnonzero(~(row < least))
    return candidates[np.argsort(-row[candidates], kind="stable")[:count]]
