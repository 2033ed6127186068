"""The small operations between matrix products and attention: what a model needs of a device.

Shapes: T tokens, E = hidden size, F = inner size of the feed-forward layer. All tensors are
contiguous, of the model's dtype and on its device. Results are new tensors.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Operations(Protocol):
    """Root mean square norms and the gate of a SwiGLU layer, on the current device stream."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x * weight / sqrt(mean(x^2) + eps) for each token of ``x`` [T, E]; weight is [E]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, both [T, E], and return the norm of the sum.

        The sum is rounded to the tensors' dtype before it is normed.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, F]: ``gate_up`` [T, 2 F] has a token's gates, then its ups."""
