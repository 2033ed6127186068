"""The operations as CUDA kernels, on a GPU or in the emulation."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu.kernels import KernelLoader
from gpu.kernels.rms_norm import RmsNorm
from gpu.kernels.silu_mul import SiluMul


class CudaOperations:
    """:class:`gpu.models.operations.Operations` for one model, in bfloat16 or float16.

    ``mlp_sizes`` are the intermediate sizes of its MLPs.

    Raises:
        ValueError: the kernels don't support a size or the dtype.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        hidden_size: int,
        mlp_sizes: Iterable[int],
        dtype: torch.dtype,
    ) -> None:
        self._norm = RmsNorm(loader, hidden_size=hidden_size, dtype=dtype)
        self._silu_mul = {size: SiluMul(loader, inner_size=size, dtype=dtype) for size in mlp_sizes}

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.rms_norm`."""
        y = torch.empty_like(x)
        self._norm.launch(x, weight, eps, y)
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.add_rms_norm`."""
        y = torch.empty_like(x)
        self._norm.launch_add(x, residual, weight, eps, y)
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.silu_mul`."""
        size = gate_up.shape[1] // 2
        y = gate_up.new_empty(gate_up.shape[0], size)
        self._silu_mul[size].launch(gate_up, y)
        return y
