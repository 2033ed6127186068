"""The model of a :class:`~trioserve.testing.FakeWorker`: pure functions of tokens.

So a test knows the expected tokens, whatever plans compute them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.embedded import FIRST_CONTENT_ID

EMBEDDING_WIDTH = 4

TokenFunction = Callable[[list[int], SamplerParams], int]
"""Function that returns the next token from all tokens before it and the sequence's parameters.
It returns ``NO_TOKEN`` or ``NAN_LOGITS`` of :mod:`trioserve.protocol.sampling` for none.
"""


def hashed_token(vocab_size: int) -> TokenFunction:
    """Return a function whose tokens look random and depend on all tokens before and the seed."""

    def token(context: list[int], sampler: SamplerParams) -> int:
        start = zlib.crc32(f"{sampler.seed}/{sampler.sequence_index}".encode())
        return zlib.crc32(wire.from_ints(context), start) % vocab_size

    return token


def draw(
    function: TokenFunction, context: list[int], sampler: SamplerParams, vocab_size: int = 0
) -> int:
    """Return the token of ``function``, or an allowed one in its place.

    For a beam it is the token with the highest :func:`beam_logprobs`.
    """
    if sampler.processed_logprobs:
        return int(beam_logprobs(context, sampler, vocab_size).argmax())
    token = function(context, sampler)
    allowed = wire.ints(sampler.allowed_token_ids)
    return int(allowed[token % len(allowed)]) if len(allowed) and token >= 0 else token


def fake_logprob(token: int, rank: int) -> float:
    """Return a fake log-probability: of ``token`` for rank 0, of its alternatives for others."""
    return -(1 + token % 8) / 8 - rank


def fake_logprobs(context: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """Return fake raw log-probabilities [vocab_size] of the token after ``context``."""
    mixed = np.arange(vocab_size, dtype=np.uint32) * np.uint32(2654435761)
    mixed ^= np.uint32(zlib.crc32(wire.from_ints(list(context))))
    mixed *= np.uint32(2246822519)
    logprobs: npt.NDArray[np.float32] = (mixed >> np.uint32(20)).astype(np.float32) / np.float32(
        -256
    )
    return logprobs


def beam_logprobs(
    context: Sequence[int], sampler: SamplerParams, vocab_size: int
) -> npt.NDArray[np.float32]:
    """Return fake processed log-probabilities [vocab_size]: -inf for tokens not allowed."""
    logprobs = fake_logprobs(context, vocab_size)
    allowed = wire.ints(sampler.allowed_token_ids)
    if len(allowed):
        masked = np.full(vocab_size, -np.inf, dtype=np.float32)
        masked[allowed] = logprobs[allowed]
        return masked
    return logprobs


def top_logprobs(
    context: Sequence[int], token: int, sampler: SamplerParams, vocab_size: int
) -> list[tuple[int, float]]:
    """Return the most probable tokens after ``context`` with their fake log-probabilities.

    By default they are the drawn ``token`` and the ids that follow it.
    """
    if not sampler.processed_logprobs:
        ranks = range(sampler.logprobs)
        return [((token + rank) % vocab_size, fake_logprob(token, rank)) for rank in ranks]
    logprobs = beam_logprobs(context, sampler, vocab_size)
    best = np.argsort(-logprobs, kind="stable")[: sampler.logprobs]
    return [(int(each), float(logprobs[each])) for each in best if logprobs[each] > -np.inf]


def prompt_piece(
    slot: int, tokens: Sequence[int], start: int, stop: int, sampler: SamplerParams, vocab_size: int
) -> wire.PromptPiece:
    """Return the :func:`fake_logprobs` of ``tokens[start:stop]`` that ``sampler`` asks for."""
    num_top = min(sampler.prompt_logprobs, vocab_size)
    rows = [fake_logprobs(tokens[:position], vocab_size) for position in range(start, stop)]
    own = [row[token] for row, token in zip(rows, tokens[start:stop], strict=True)]
    ranks = [1 + int((row > logprob).sum()) for row, logprob in zip(rows, own, strict=True)]
    top = [np.argsort(-row, kind="stable")[:num_top] for row in rows]
    top_logprobs = [row[ids] for row, ids in zip(rows, top, strict=True)]
    asked = [row[sampler.logprob_token_ids] for row in rows]
    return wire.PromptPiece(
        slot=slot,
        start=start,
        logprobs=wire.from_floats(np.array(own)),
        ranks=wire.from_ints(ranks),
        top_ids=wire.from_ints(np.concatenate(top).astype(np.int32)),
        top_logprobs=wire.from_floats(np.concatenate(top_logprobs)),
        ids_logprobs=wire.from_floats(np.concatenate(asked)),
    )


KV_SHAPE = (2, 1, 3)
"""Layers, KV heads and numbers of a head of the keys and values that a fake worker takes."""


def embedded_token(row: npt.NDArray[Any]) -> int:
    """Return the token that stands for an embedding [E], or for keys and values: a digest, which no
    vocabulary has.
    """
    return FIRST_CONTENT_ID + zlib.crc32(row.tobytes()) % FIRST_CONTENT_ID


def adapter_shift(path: str) -> int:
    """Return the number that an adapter from the folder ``path`` adds to each token."""
    return zlib.crc32(path.encode()) % 97 + 1


def digests_of(tokens: npt.NDArray[np.int32], start: int) -> npt.NDArray[np.uint64]:
    """Return the cumulative digests of ``tokens``, whose first position is ``start``."""
    position = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    weights = (position * np.uint64(0x9E3779B97F4A7C15)) ^ (position << np.uint64(23))
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * weights
    sums: npt.NDArray[np.uint64] = np.cumsum(terms, dtype=np.uint64)
    return sums
