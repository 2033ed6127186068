"""MPNet's bias of attention scores, by the distance between two tokens.

Distances from -L to L fall into kinds: each of the near ones is a kind of its own, the far ones
share kinds that grow with their logarithm (Raffel et al. 2019, arXiv:1910.10683). Each head has a
number for each kind, the same in all layers.
"""

from __future__ import annotations

import math

import torch

MAX_DISTANCE = 128
"""All that are further are of the last kind."""


def buckets_of(distances: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the kinds, from 0 on, of the int64 ``distances`` of keys from queries, of the same
    shape.

    Half of the kinds is for keys that come later.
    """
    half = num_buckets // 2
    num_exact = half // 2
    far = distances.abs()
    # Below 1 there is no logarithm, and none is wanted.
    grown = torch.log(far.clamp(min=1).float() / num_exact)
    shared = grown / math.log(MAX_DISTANCE / num_exact) * (half - num_exact)
    kinds = torch.where(far < num_exact, far, (num_exact + shared.long()).clamp(max=half - 1))
    return kinds + half * (distances > 0)


class RelativeBias:
    """The numbers of one model, for sequences of up to ``max_length`` tokens.

    ``table`` [kinds, H] is the model's.
    """

    def __init__(self, table: torch.Tensor, max_length: int) -> None:
        distances = torch.arange(1 - max_length, max_length, device=table.device)
        self._max_length = max_length
        self._by_distance = table[buckets_of(distances, len(table))].T  # [H, 2 max_length - 1]

    def of_length(self, length: int) -> torch.Tensor:
        """Return the bias of a sequence's scores: [1, H, length, length]."""
        middle = self._max_length - 1
        near = self._by_distance[:, middle - length + 1 : middle + length]
        # Row i of the windows begins at the distance i - length + 1: the last query comes first.
        return near.unfold(1, length, 1).flip(1).unsqueeze(0)
