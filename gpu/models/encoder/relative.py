"""MPNet's relative position bias of attention scores.

Distances are put into buckets: one for each small distance, and logarithmic ones for large
distances (Raffel et al. 2019, arXiv:1910.10683). Each head has a bias for each bucket, shared by
all layers.
"""

from __future__ import annotations

import math

import torch

MAX_DISTANCE = 128
"""Distances from here on are in the last bucket."""


def buckets_of(distances: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the bucket of each of the int64 ``distances`` (key minus query), in the same shape.

    The second half of the buckets is for keys after the query.
    """
    half = num_buckets // 2
    num_exact = half // 2
    far = distances.abs()
    # Distance 0 has no logarithm; its result isn't used.
    grown = torch.log(far.clamp(min=1).float() / num_exact)
    shared = grown / math.log(MAX_DISTANCE / num_exact) * (half - num_exact)
    buckets = torch.where(far < num_exact, far, (num_exact + shared.long()).clamp(max=half - 1))
    return buckets + half * (distances > 0)


class RelativeBias:
    """The score biases of one model, for sequences of up to ``max_length`` tokens.

    ``table`` is the weight [buckets, H].
    """

    def __init__(self, table: torch.Tensor, max_length: int) -> None:
        distances = torch.arange(1 - max_length, max_length, device=table.device)
        self._max_length = max_length
        self._by_distance = table[buckets_of(distances, len(table))].T  # [H, 2 max_length - 1]

    def of_length(self, length: int) -> torch.Tensor:
        """Return the score bias of a sequence of ``length`` tokens: [1, H, length, length]."""
        middle = self._max_length - 1
        near = self._by_distance[:, middle - length + 1 : middle + length]
        # Window i starts at the distance i - length + 1, so unfold gives the last query first.
        return near.unfold(1, length, 1).flip(1).unsqueeze(0)
