"""Refuses a model with other logits over the paged cache than with transformers' attention.

Families differ in more than probing can detect, and every release of transformers adds new ones.
Each model therefore computes the same tokens twice before it is served: in one piece with
transformers' eager attention and no cache, and in chunks over pages, beside another sequence. The
logits may differ by rounding only. Rounding grows with depth, so a larger difference is compared
with that between two of transformers' own attention functions.
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
# At most so many tokens of each of the two sequences in each step: chunks and single tokens.
STEPS = ((10, 0), (1, 9), (8, 1), (1, 1), (NUM_TOKENS, NUM_TOKENS))
# Relative to the norm of the logits. In small models rounding gives 1e-6 (float32) and 0.01
# (bfloat16), positions off by one 0.1, and keys of the other sequence 0.7.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
MOST_ROUNDING = 3.0
"""Largest accepted multiple of the difference between transformers' own attention functions."""


def check_against_plain(
    decoder: TransformersDecoder, layers: Sequence[LayerShape], vocab_size: int, longest: int
) -> None:
    """Compare paged with plain attention, on sequences of at most ``longest`` tokens.

    Raises:
        ModelLoadError: the logits differ, or the size of the vocabulary isn't ``vocab_size``.
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
    if not error <= MOST_ROUNDING * _difference(other, plain):  # refuses NaN too
        raise refusal(
            name,
            "gives other logits over a paged cache than with plain attention "
            f"({error:.2g} of their size)",
        )


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative difference of logits [T, V]: the median over tokens.

    Rounding may make a router choose another expert, which changes the logits of single tokens.
    """
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def _plain(model: Any, tokens: torch.Tensor, implementation: str) -> torch.Tensor:
    """Return logits [T, V] float32 of ``tokens`` [T] with transformers' own attention function."""
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
    """Return hidden states [T, E] of ``tokens``, computed in chunks beside the reversed tokens."""
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
            # The sequences alternate, so that no two of a sequence's pages are adjacent.
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
