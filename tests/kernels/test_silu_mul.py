"""The SwiGLU gate kernel against float64."""

from __future__ import annotations

import pytest
import torch

from gpu.kernels import KernelLoader
from gpu.kernels.silu_mul import SiluMul
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.rounding import share_rounded_otherwise

pytestmark = pytest.mark.every_arithmetic

ROUNDING = {torch.bfloat16: 3e-3, torch.float16: 4e-4}


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def run(loader: KernelLoader, gate_up: torch.Tensor) -> torch.Tensor:
    num_tokens, size = gate_up.shape
    y = poisoned((num_tokens, size // 2), gate_up.dtype, loader)
    SiluMul(loader, inner_size=size // 2, dtype=gate_up.dtype).launch(place(gate_up, loader), y)
    return y


# A block does 2048 numbers of a row; sizes below, at and across that.
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("inner_size", [8, 1016, 1536, 2048, 2056, 5464])
def test_silu_mul(loader: KernelLoader, inner_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inner_size)
    gate_up = (torch.randn(3, 2 * inner_size, generator=generator) * 4).to(dtype)
    y, wanted = run(loader, gate_up), reference(gate_up)
    assert relative_error(y, wanted) < ROUNDING[dtype]
    assert share_rounded_otherwise(y, wanted) < 0.01


@pytest.mark.parametrize("dtype", ROUNDING)
def test_large_and_small_gates(loader: KernelLoader, dtype: torch.dtype) -> None:
    gates = torch.tensor([-60000.0, -200.0, -90.0, -20.0, -1e-4, 0.0, 90.0, 60000.0])
    gate_up = torch.cat([gates, torch.full((8,), 0.5)])[None].to(dtype)
    result, wanted = run(loader, gate_up), reference(gate_up)
    torch.testing.assert_close(result.double().cpu(), wanted, rtol=ROUNDING[dtype] * 2, atol=1e-7)


def test_the_order_of_threads_does_not_matter(loaders: list[KernelLoader]) -> None:
    gate_up = torch.randn(2, 4112, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = [run(loader, gate_up) for loader in loaders]
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)


def test_sizes_and_dtypes_without_a_kernel(loader: KernelLoader) -> None:
    with pytest.raises(ValueError, match="12"):
        SiluMul(loader, inner_size=12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        SiluMul(loader, inner_size=64, dtype=torch.float32)
