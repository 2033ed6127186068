"""From the vectors of all tokens to one for each sequence.

Shapes: T tokens of N sequences one after the other, E numbers for each token. ``ends`` [N + 1]
int64 is where each sequence begins and the next one does: sequence i has the tokens ``ends[i]`` to
``ends[i + 1] - 1``, at least one, and ``ends[N]`` is T.
"""

from __future__ import annotations

import torch

from trioserve.model_files.encoder_config import Pooling


def pool(hidden: torch.Tensor, ends: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return the pooled vectors [N, E] float32 of ``hidden`` [T, E]; ``ends`` is on the same
    device.

    Sums are made in float32, whatever the dtype of ``hidden``.
    """
    match pooling:
        case "cls":
            return hidden[ends[:-1]].float()
        case "last":
            return hidden[ends[1:] - 1].float()
        case "mean" | "max":
            pooled: torch.Tensor = torch.segment_reduce(hidden.float(), pooling, offsets=ends)
            return pooled
