"""The operations in plain torch: the reference, and the CPU's implementation without kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchOperations:
    """:class:`gpu.models.operations.Operations` for any device and dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.rms_norm`."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.add_rms_norm`."""
        residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
