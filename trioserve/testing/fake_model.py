"""What a :class:`~trioserve.testing.FakeWorker` has for a model: pure functions of tokens.

So a test can say what has to come out, whatever the plans were that it came out of.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams

TokenFunction = Callable[[list[int], SamplerParams], int]
"""Makes the next token of all the tokens before it and the sequence's parameters. ``NO_TOKEN`` or
``NAN_LOGITS`` of :mod:`trioserve.protocol.sampling` is none."""


def hashed_token(vocab_size: int) -> TokenFunction:
    """A function whose tokens look random, depend on every token before them, and on the seed."""

    def token(context: list[int], sampler: SamplerParams) -> int:
        start = zlib.crc32(f"{sampler.seed}/{sampler.sequence_index}".encode())
        return zlib.crc32(wire.from_ints(context), start) % vocab_size

    return token


def draw(function: TokenFunction, context: list[int], sampler: SamplerParams) -> int:
    """The token that ``function`` makes, or one of those allowed in its place, if it is one."""
    token = function(context, sampler)
    allowed = wire.ints(sampler.allowed_token_ids)
    return int(allowed[token % len(allowed)]) if len(allowed) and token >= 0 else token


def fake_logprob(token: int, rank: int) -> float:
    """The log-probability that a fake worker reports for the alternative ``rank`` to ``token``."""
    return -(1 + token % 8) / 8 - rank


def fake_logprobs(context: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """[vocab_size]: a likeness of raw log-probabilities of what may follow ``context``."""
    mixed = np.arange(vocab_size, dtype=np.uint32) * np.uint32(2654435761)
    mixed ^= np.uint32(zlib.crc32(wire.from_ints(list(context))))
    mixed *= np.uint32(2246822519)
    logprobs: npt.NDArray[np.float32] = (mixed >> np.uint32(20)).astype(np.float32) / np.float32(
        -256
    )
    return logprobs


def prompt_piece(
    slot: int, tokens: Sequence[int], start: int, stop: int, sampler: SamplerParams, vocab_size: int
) -> wire.PromptPiece:
    """What :func:`fake_logprobs` says of ``tokens[start:stop]``, as ``sampler`` asks for it."""
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
