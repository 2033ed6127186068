"""The seam between a model's forward pass and its adapters."""

from __future__ import annotations

from typing import Protocol

import torch


class ProductUpdates(Protocol):
    """Some or all of the adapters in a step."""

    def update(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to a product's result ``y`` [T, outputs] what adapters make of ``x`` [T, inputs].

        Only tokens that have one of these adapters change. ``product`` is a name of
        :data:`gpu.weights.packed_modules.PACKED_MODULES`.
        """
