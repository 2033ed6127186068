"""Log-probabilities of given tokens: those of prompts, and those of ids that a request names.

All are raw, of the model's own distribution. A hidden state says what follows its token, so the
state at position p - 1 gives the log-probability of the prompt's token p; the first token has none.

The logits of a whole prompt would be hundreds of megabytes, so they are made and reduced in slices
of :data:`SLICE_BYTES`. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu.slots import Slot
from gpu.upload import upload
from trioserve.wire import PromptPiece, from_floats, from_ints

__all__ = [
    "SLICE_BYTES",
    "PromptSpan",
    "in_rows",
    "logprobs_of",
    "peak_bytes",
    "prompt_piece",
    "score_prompt",
]

SLICE_BYTES = 64 << 20
"""Logits that exist at a time."""
# Logits whose most probable tokens are looked for at a time, at four times their size: on a CPU
# what stays in its cache.
_TOP_BYTES = {"cpu": 1 << 20}
_TOP_BYTES_ELSEWHERE = 16 << 20
_NOTHING = np.empty(0, dtype=np.float32)


@attrs.frozen(kw_only=True)
class PromptSpan:
    """Prompt tokens of one slot, at positions ``start`` to ``stop`` - 1, that a step reports on."""

    slot: Slot
    start: int
    stop: int
    first_hidden: int
    """Which of the step's hidden states gives the token at ``start``; the others follow it."""


def score_prompt(
    span: PromptSpan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> list[Tensor]:
    """The numbers of ``span``, on the device; :func:`prompt_piece` makes the message of them.

    With P positions, K of the slot's ``prompt_logprobs`` (at most the vocabulary's size) and M of
    its ``logprob_token_ids``: log-probabilities [P], ranks [P] int32, and of the most probable
    tokens, of which the smaller id comes first among equals, the ids [P, K] int32 and
    log-probabilities [P, K]; last the log-probabilities [P, M] of the ids asked for. Floats are
    float32.

    Args:
        hidden: [T, E], the step's hidden states.
        logits_of: the model's logits [n, vocab_size] float32 of n of them.
    """
    slot, device = span.slot, hidden.device
    tokens = upload(slot.tokens[span.start : span.stop].astype(np.int64), device)
    ids = upload(np.array([slot.sampler.logprob_token_ids], dtype=np.int64), device)
    states = hidden[span.first_hidden : span.first_hidden + len(tokens)]
    size = _rows_in_a_slice(vocab_size)
    scored = [
        _score(logits_of(states[i : i + size]), tokens[i : i + size, None], ids, slot)
        for i in range(0, len(states), size)
    ]
    return [torch.cat(parts) for parts in zip(*scored, strict=True)]


def prompt_piece(span: PromptSpan, arrays: Sequence[npt.NDArray[Any]]) -> PromptPiece:
    """The message about ``span`` with the five ``arrays`` of :func:`score_prompt`, on the host."""
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


def logprobs_of(
    logits: Tensor, rows: npt.NDArray[np.int64], ids: Collection[Sequence[int]]
) -> Tensor:
    """[A, M] float32: log-probabilities of ``ids[i]`` in row ``rows[i]`` of ``logits`` [R, V].

    There are A rows, at least one, each with at most M ids; what stands behind a row's last means
    nothing.
    """
    padded = np.zeros((len(ids), max(map(len, ids))), dtype=np.int64)
    for row, each in zip(padded, ids, strict=True):
        row[: len(each)] = each
    where = upload(rows, logits.device)
    wanted = upload(padded, logits.device)
    size = _rows_in_a_slice(logits.shape[1])
    parts = []
    for i in range(0, len(rows), size):
        part = logits.index_select(0, where[i : i + size])
        parts.append(_of_ids(part, part.logsumexp(dim=1, keepdim=True), wanted[i : i + size]))
    return torch.cat(parts)


def peak_bytes(vocab_size: int, num_tokens: int) -> int:
    """What reporting on ``num_tokens`` allocates at a time, at most, besides the reports.

    That is a slice of logits, and for the keys of its parts or its exponentials less than twice
    as much.
    """
    return 3 * 4 * vocab_size * min(num_tokens, _rows_in_a_slice(vocab_size))


def in_rows(
    num_rows: int, named: Mapping[int, Sequence[int]], values: npt.NDArray[np.float32]
) -> list[npt.NDArray[np.float32]]:
    """For each of ``num_rows`` rows what :func:`logprobs_of` found for its ids, if it has any.

    ``named`` has the ids of some rows, in the order of ``values``.
    """
    lists = [_NOTHING] * num_rows
    for (row, ids), found in zip(named.items(), values, strict=True):
        lists[row] = found[: len(ids)]
    return lists


def _rows_in_a_slice(vocab_size: int) -> int:
    return max(SLICE_BYTES // (4 * vocab_size), 1)


def _score(logits: Tensor, tokens: Tensor, ids: Tensor, slot: Slot) -> tuple[Tensor, ...]:
    """:func:`score_prompt` for the ``tokens`` [n, 1] of one slice with ``logits`` [n, V]."""
    normalizers = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens)
    ranks = (logits > chosen).sum(dim=1, dtype=torch.int32) + 1
    top_ids = _most_probable(logits, slot.sampler.prompt_logprobs)
    top_logprobs = logits.gather(1, top_ids) - normalizers
    of_ids = _of_ids(logits, normalizers, ids.expand(len(logits), -1))
    return (chosen - normalizers)[:, 0], ranks, top_ids.int(), top_logprobs, of_ids


def _of_ids(logits: Tensor, normalizers: Tensor, ids: Tensor) -> Tensor:
    """[n, M]: log-probabilities of ``ids`` [n, M] int64; ids past the vocabulary have -inf."""
    known = ids < logits.shape[1]
    values = logits.gather(1, torch.where(known, ids, 0)) - normalizers
    return torch.where(known, values, -torch.inf)


def _most_probable(logits: Tensor, count: int) -> Tensor:
    """[n, count] int64: ids by falling logit, and by rising id among equals."""
    vocab_size = logits.shape[1]
    count = min(max(count, 0), vocab_size)
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    falling = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    size = max(_TOP_BYTES.get(logits.device.type, _TOP_BYTES_ELSEWHERE) // (4 * vocab_size), 1)
    keys = [_keys(part, falling).topk(count, dim=1).values for part in torch.split(logits, size)]
    return vocab_size - 1 - (torch.cat(keys) & 0xFFFFFFFF)


def _keys(logits: Tensor, low: Tensor) -> Tensor:
    """[n, V] int64 that are ordered as the logits are, equal ones as ``low`` is."""
    # The bits of a float are ordered as its value, those of negative ones the other way round;
    # adding 0 makes the two zeros one.
    bits = logits.add(0.0).view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | low
