"""The slots of a fake worker, and what its rows report besides tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.protocol.reports import CONTEXT_LOGITS, GENERATION_LOGITS, HIDDEN_STATES
from trioserve.protocol.sampling import SamplerParams
from trioserve.testing.fake_model import fake_logprobs, prompt_piece

HIDDEN_SIZE = 2


@attrs.define(eq=False, kw_only=True)
class FakeSlot:
    """An open slot of a fake worker."""

    generation: int
    tokens: list[int]
    prompt_length: int
    computed: int
    pages: list[int]
    sampler: SamplerParams
    adapter: int
    prompt_logprobs_from: int
    states_from: int
    context_logits_from: int
    sum_of_tokens: int = 0
    """Sum of the computed tokens of a pooled prompt."""
    stopped: bool = False
    """True once it sampled a stop id, had no token to sample, or was dropped."""


@attrs.frozen
class FakeReport:
    """The report of a row besides its tokens."""

    prompt: wire.PromptPiece | None
    pooled: wire.PooledPrompt | None
    tensors: list[wire.TensorPiece]

    @classmethod
    def of(cls, slot: FakeSlot, number: int, count: int, vocab_size: int) -> FakeReport:
        """Return the report of a row that computes the next ``count`` tokens of slot ``number``."""
        return cls(
            _prompt_piece(slot, number, count, vocab_size),
            _pooled(slot, number, count),
            _tensors(slot, number, count, vocab_size),
        )


def fake_state(context: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the fake hidden state [HIDDEN_SIZE] behind the last token of ``context``."""
    digest = zlib.crc32(np.array(context, dtype="<i4").tobytes())
    return np.array([len(context), digest % 65521], dtype=np.float32)


def _prompt_piece(
    slot: FakeSlot, number: int, count: int, vocab_size: int
) -> wire.PromptPiece | None:
    """Return the log-probabilities of prompt tokens in the row."""
    if slot.prompt_logprobs_from == -1:
        return None
    start = max(slot.prompt_logprobs_from, slot.computed + 1)
    stop = min(slot.computed + count + 1, slot.prompt_length)
    if start >= stop:
        return None
    return prompt_piece(number, slot.tokens, start, stop, slot.sampler, vocab_size)


def _pooled(slot: FakeSlot, number: int, count: int) -> wire.PooledPrompt | None:
    """Return the pooled vector of a prompt if the row completes the prompt.

    The vector is the mean of the tokens, or the last one, in place of hidden states.
    """
    stop = slot.computed + count
    if not slot.sampler.pooling or stop > slot.prompt_length:
        return None
    slot.sum_of_tokens += sum(slot.tokens[slot.computed : stop])
    if stop < slot.prompt_length:
        return None
    mean = slot.sum_of_tokens / slot.prompt_length
    value = mean if slot.sampler.pooling == "mean" else slot.tokens[stop - 1]
    return wire.PooledPrompt(slot=number, vector=wire.from_floats([value, 1.0]))


def _tensors(slot: FakeSlot, number: int, count: int, vocab_size: int) -> list[wire.TensorPiece]:
    """Return the hidden states, and :func:`fake_logprobs` as logits, that the row computes."""
    stop = slot.computed + count
    first = {HIDDEN_STATES: slot.states_from, CONTEXT_LOGITS: slot.context_logits_from}
    stops = {HIDDEN_STATES: stop, CONTEXT_LOGITS: min(stop, slot.prompt_length)}
    if slot.sampler.generation_logits:
        first[GENERATION_LOGITS] = len(slot.tokens) - 1
        stops[GENERATION_LOGITS] = stop
    pieces = []
    for name in (each for each in first if first[each] != -1 and not slot.stopped):
        start = max(first[name], slot.computed)
        contexts = [slot.tokens[: place + 1] for place in range(start, stops[name])]
        rows = [
            fake_state(each) if name == HIDDEN_STATES else fake_logprobs(each, vocab_size)
            for each in contexts
        ]
        if rows:
            column = wire.from_floats(np.concatenate(rows))
            pieces.append(wire.TensorPiece(slot=number, name=name, start=start, rows=column))
    return pieces
