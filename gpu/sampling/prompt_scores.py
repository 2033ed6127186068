"""Log-probabilities of given tokens, in torch on the device of the logits.

See :mod:`gpu.sampling.prompt_logprobs`. Nothing here synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu._util.upload import upload
from gpu.sampling.prompt_logprobs import PromptSpan, padded_ids, rows_in_a_slice
from gpu.slots import Slot

_TOP_BYTES = 16 << 20
"""Bytes of logits searched for the most probable tokens at a time; this takes four times them."""


def score_prompt(
    span: PromptSpan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> list[Tensor]:
    """Return the arrays of :func:`gpu.sampling.prompt_logprobs.prompt_piece` for ``span``.

    Args:
        span: the prompt tokens.
        hidden: [T, E], hidden states of the step.
        logits_of: returns the logits [n, vocab_size] float32 of hidden states [n, E].
        vocab_size: the model's.
    """
    slot, device = span.slot, hidden.device
    tokens = upload(slot.tokens[span.start : span.stop].astype(np.int64), device)
    ids = upload(np.array([slot.sampler.logprob_token_ids], dtype=np.int64), device)
    states = hidden[span.first_hidden : span.first_hidden + len(tokens)]
    size = rows_in_a_slice(vocab_size)
    scored = [
        _score(logits_of(states[i : i + size]), tokens[i : i + size, None], ids, slot)
        for i in range(0, len(states), size)
    ]
    return [torch.cat(parts) for parts in zip(*scored, strict=True)]


def logprobs_of(
    logits: Tensor, rows: npt.NDArray[np.int64], ids: Collection[Sequence[int]]
) -> Tensor:
    """Return log-probabilities [A, M] float32 of ``ids[i]`` in row ``rows[i]`` of ``logits``.

    ``logits`` is [R, V]. There is at least one row of ids, the longest of M; others are padded.
    """
    where = upload(rows, logits.device)
    wanted = upload(padded_ids(ids), logits.device)
    size = rows_in_a_slice(logits.shape[1])
    parts = []
    for i in range(0, len(rows), size):
        part = logits.index_select(0, where[i : i + size])
        parts.append(_of_ids(part, part.logsumexp(dim=1, keepdim=True), wanted[i : i + size]))
    return torch.cat(parts)


def _score(logits: Tensor, tokens: Tensor, ids: Tensor, slot: Slot) -> tuple[Tensor, ...]:
    """Return the arrays of :func:`score_prompt` for ``tokens`` [n, 1] with ``logits`` [n, V]."""
    normalizers = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens)
    ranks = (logits > chosen).sum(dim=1, dtype=torch.int32) + 1
    top_ids = _most_probable(logits, slot.sampler.prompt_logprobs)
    top_logprobs = logits.gather(1, top_ids) - normalizers
    of_ids = _of_ids(logits, normalizers, ids.expand(len(logits), -1))
    return (chosen - normalizers)[:, 0], ranks, top_ids.int(), top_logprobs, of_ids


def _of_ids(logits: Tensor, normalizers: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities [n, M] of ``ids`` [n, M] int64; -inf for ids out of range."""
    known = ids < logits.shape[1]
    values = logits.gather(1, torch.where(known, ids, 0)) - normalizers
    return torch.where(known, values, -torch.inf)


def _most_probable(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the largest logits, [n, count] int64; smaller ids first among equals."""
    vocab_size = logits.shape[1]
    count = min(max(count, 0), vocab_size)
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    falling = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    size = max(_TOP_BYTES // (4 * vocab_size), 1)
    keys = [_keys(part, falling).topk(count, dim=1).values for part in torch.split(logits, size)]
    return vocab_size - 1 - (torch.cat(keys) & 0xFFFFFFFF)


def _keys(logits: Tensor, low: Tensor) -> Tensor:
    """Return sort keys [n, V] int64 in the order of the logits; ``low`` orders equal ones."""
    # Bit patterns of floats are ordered like their values, and reversed for negative ones. Adding 0
    # turns -0 into 0.
    bits = logits.add(0.0).view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | low
