"""A model that computes something else over the paged cache than with plain attention isn't served.

Families differ in more than a probe of their attention can see, and new ones come with every
release of transformers. So each model is run on the same tokens twice before it serves: at once
with transformers' own plain attention and no cache, and in pieces beside another sequence over
pages. What is left between the two is rounding, or the model is refused. How much rounding there is
depends on the model's depth, so where it isn't little, two of transformers' own attentions say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.cpu.torch_model import TorchModel
from gpu.models.transformers_models.attention import LayerShape, PagedLayers
from gpu.models.transformers_models.decoder import TransformersDecoder
from gpu.models.transformers_models.interface import NAME
from gpu.models.transformers_models.probing import refusal
from gpu.slots import SlotTable
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

NUM_TOKENS = 24
PAGE_SIZE = 4
# How many tokens of each of two sequences a step computes at most: pieces and single tokens mixed.
STEPS = ((10, 0), (1, 9), (8, 1), (1, 1), (NUM_TOKENS, NUM_TOKENS))
# Of the logits' own norm. In small models rounding gives 1e-6 and 0.01, positions that are off by
# one 0.1, another's keys 0.7.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
MOST_ROUNDING = 3.0
"""Times the difference of two of transformers' own attentions."""


def check_against_plain(
    decoder: TransformersDecoder, layers: Sequence[LayerShape], vocab_size: int, longest: int
) -> None:
    """Compare the two, on sequences of at most ``longest`` tokens.

    Raises:
        ModelLoadError: they differ, or are of another vocabulary.
    """
    name = type(decoder.model).__name__
    length = min(NUM_TOKENS, longest)
    tokens = np.random.default_rng(0).integers(vocab_size, size=length)
    with torch.inference_mode():
        plain = _plain(decoder.model, torch.from_numpy(tokens), "eager")
        paged = decoder.logits(_paged(decoder, layers, tokens, vocab_size)).float()
    if plain.shape[1] != vocab_size:
        raise refusal(name, f"gives {plain.shape[1]} logits for {vocab_size} tokens")
    error = _difference(paged, plain)
    if error <= TOLERANCES[decoder.dtype]:
        return
    with torch.inference_mode():
        other = _plain(decoder.model, torch.from_numpy(tokens), "sdpa")
    if not error <= MOST_ROUNDING * _difference(other, plain):  # NaN isn't either
        raise refusal(
            name,
            "gives other logits over a paged cache than with plain attention "
            f"({error:.2g} of their size)",
        )


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the difference of logits [T, V], as a part of their size.

    A router that picks another expert by a hair may change single tokens at will: the median
    counts.
    """
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def _plain(model: Any, tokens: torch.Tensor, implementation: str) -> torch.Tensor:
    """Logits [T, V] float32 of ``tokens`` [T], with one of transformers' own attentions."""
    model.set_attn_implementation(implementation)
    try:
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(NAME)
    return logits.float()


def _paged(
    decoder: TransformersDecoder,
    layers: Sequence[LayerShape],
    tokens: npt.NDArray[np.int64],
    vocab_size: int,
) -> torch.Tensor:
    """Hidden states [T, E] of ``tokens``, computed in pieces beside the same ones backwards."""
    length = len(tokens)
    per_sequence = -(-length // PAGE_SIZE)
    num_pages = 2 * per_sequence
    attention = PagedLayers(layers, page_size=PAGE_SIZE, num_pages=num_pages, dtype=decoder.dtype)
    model = TorchModel(decoder, attention)
    slots = SlotTable(
        num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=length, vocab_size=vocab_size
    )
    sequences = (tokens, tokens[::-1])
    opened = [
        OpenSlot(
            slot=slot,
            generation=0,
            tokens=from_ints(sequences[slot]),
            prompt_length=length,
            computed=0,
            # The two take turns, so that no page follows another of its sequence.
            pages=from_ints(range(slot, num_pages, 2)),
            sampler=SamplerParams(temperature=0.0),
        )
        for slot in range(2)
    ]
    slots.apply(Plan(number=1, opened=opened, row_slots=from_ints([]), row_counts=from_ints([])))
    pieces = []
    for number, wanted in enumerate(STEPS, start=2):
        counts = [min(most, length - slots[slot].computed) for slot, most in enumerate(wanted)]
        computing = [slot for slot in range(2) if counts[slot]]
        if not computing:
            continue
        rows = slots.apply(
            Plan(
                number=number,
                row_slots=from_ints(computing),
                row_counts=from_ints([counts[slot] for slot in computing]),
            )
        )
        hidden, ends = model.forward(rows, slots)
        for row, end in zip(rows, ends.tolist(), strict=True):
            row.slot.computed = row.end
            if row.slot.number == 0:
                pieces.append(hidden[end + 1 - row.count : end + 1].clone())
    return torch.cat(pieces)
