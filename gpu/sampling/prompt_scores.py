"""Log-probabilities of given tokens, by torch, on the device that has the logits.

See :mod:`gpu.sampling.prompt_logprobs`. Nothing here waits for the device.
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
"""Bytes of logits that are searched for the most probable tokens at a time; takes four times it."""


def score_prompt(
    span: PromptSpan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> list[Tensor]:
    """Return what :func:`gpu.sampling.prompt_logprobs.prompt_piece` makes the message about
    ``span`` of.

    Args:
        hidden: [T, E], the step's hidden states.
        logits_of: the model's logits [n, vocab_size] float32 of n of them.
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
    """[A, M] float32: log-probabilities of ``ids[i]`` in row ``rows[i]`` of ``logits`` [R, V].

    There are A rows, at least one, each with at most M ids; what stands behind a row's last means
    nothing.
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
    size = max(_TOP_BYTES // (4 * vocab_size), 1)
    keys = [_keys(part, falling).topk(count, dim=1).values for part in torch.split(logits, size)]
    return vocab_size - 1 - (torch.cat(keys) & 0xFFFFFFFF)


def _keys(logits: Tensor, low: Tensor) -> Tensor:
    """[n, V] int64 that are ordered as the logits are, equal ones as ``low`` is."""
    # The bits of a float are ordered as its value, those of negative ones the other way round;
    # adding 0 makes the two zeros one.
    bits = logits.add(0.0).view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | low
