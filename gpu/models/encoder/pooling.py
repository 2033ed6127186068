"""Pooling of the hidden states of a sequence's tokens into one vector.

Shapes: T tokens of N sequences, concatenated, E = hidden_size. ``ends`` is [N + 1] int64: sequence
i has the tokens ``ends[i]`` to ``ends[i + 1] - 1``, at least one.
"""

from __future__ import annotations

import torch

from trioserve.model_files.encoder_config import Pooling


def pool(hidden: torch.Tensor, ends: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return pooled vectors [N, E] float32 of ``hidden`` [T, E]; ``ends`` is on the same device.

    Sums are computed in float32 for any dtype of ``hidden``.
    """
    match pooling:
        case "cls":
            return hidden[ends[:-1]].float()
        case "last":
            return hidden[ends[1:] - 1].float()
        case "mean" | "max":
            pooled: torch.Tensor = torch.segment_reduce(hidden.float(), pooling, offsets=ends)
            return pooled
