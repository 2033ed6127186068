"""The operations between matrix products and attention, which each device implements.

Shapes: T tokens, E = hidden_size, F = intermediate_size. All tensors are contiguous, of the model's
dtype and on its device. Results are new tensors.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Operations(Protocol):
    """RMS norm and the gate of a SwiGLU layer, on the current device stream.

    RMS norm: Zhang and Sennrich 2019, arXiv:1910.07467. SwiGLU: Shazeer 2020, arXiv:2002.05202.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x * weight / sqrt(mean(x^2) + eps) for ``x`` [T, E] and ``weight`` [E]: [T, E]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, both [T, E], and return the norm of the sum.

        The sum is rounded to the tensors' dtype before the norm.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [T, F]; a row of ``gate_up`` [T, 2 F] is gate, then up."""
