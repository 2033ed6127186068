"""The seam between a decoder and the other ranks."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """The ranks of a group, seen from one of them. All call the same methods in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' ``x``, contiguous and of one shape; ``x`` may be changed."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' ``x`` [R, N] side by side, [R, size * N], in the order of the ranks."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's ``x``, contiguous and of one shape, in the memory of this rank's."""
        ...


class Alone:
    """The only rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x
