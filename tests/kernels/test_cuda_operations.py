"""The small operations as kernels against the same in torch."""

from __future__ import annotations

import pytest
import torch

from gpu.kernels import KernelLoader
from gpu.models.operations.cuda_ops import CudaOperations
from gpu.models.operations.torch_ops import TorchOperations
from tests.kernels.memory import place, relative_error

EPS = 1e-5
# Two results, each rounded on its own.
ROUNDING = {torch.bfloat16: 5e-3, torch.float16: 6e-4}


def inputs(
    dtype: torch.dtype, loader: KernelLoader, *shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [place(torch.randn(shape, generator=generator).to(dtype), loader) for shape in shapes]


def operations(dtype: torch.dtype, loader: KernelLoader) -> CudaOperations:
    return CudaOperations(loader, hidden_size=576, mlp_sizes=(1536,), dtype=dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_norms(loader: KernelLoader, num_tokens: int, dtype: torch.dtype) -> None:
    shape = (num_tokens, 576)
    x, residual, weight = inputs(dtype, loader, shape, shape, (576,))
    by_kernel, by_torch = operations(dtype, loader), TorchOperations()
    y, wanted = by_kernel.rms_norm(x, weight, EPS), by_torch.rms_norm(x, weight, EPS)
    assert y.shape == shape
    assert y.dtype == dtype
    assert relative_error(y, wanted) < ROUNDING[dtype]
    residuals = [residual.clone(), residual.clone()]
    y = by_kernel.add_rms_norm(x, residuals[0], weight, EPS)
    wanted = by_torch.add_rms_norm(x, residuals[1], weight, EPS)
    assert relative_error(y, wanted) < ROUNDING[dtype]
    assert torch.equal(*residuals)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_silu_mul(loader: KernelLoader, num_tokens: int, dtype: torch.dtype) -> None:
    (gate_up,) = inputs(dtype, loader, (num_tokens, 2 * 1536))
    y = operations(dtype, loader).silu_mul(gate_up)
    assert y.shape == (num_tokens, 1536)
    assert y.dtype == dtype
    assert relative_error(y, TorchOperations().silu_mul(gate_up)) < ROUNDING[dtype]


def test_a_dtype_without_kernels(loader: KernelLoader) -> None:
    with pytest.raises(ValueError, match="float32"):
        operations(torch.float32, loader)
