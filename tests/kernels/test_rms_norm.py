"""The norm kernel against float64, and its addition against torch's rounding."""

from __future__ import annotations

import pytest
import torch

from gpu.kernels import KernelLoader
from gpu.kernels.rms_norm import MAX_HIDDEN_SIZE, VARIANTS, RmsNorm, rms_norm_source
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.rounding import share_rounded_otherwise

pytestmark = pytest.mark.every_arithmetic

EPS = 1e-5
ROUNDING = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
# Each tiling filled to its end, and one that isn't; 8 leaves most of a block without work.
HIDDEN_SIZES = [8, 576, 1024, 1032, 2048, 3072, 4096, 5120, 8192, 16384]


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def inputs(
    hidden_size: int, dtype: torch.dtype, num_tokens: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hidden_size)
    x, residual = torch.randn(2, num_tokens, hidden_size, generator=generator) * 3
    weight = torch.rand(hidden_size, generator=generator) + 0.5
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_norm(loader: KernelLoader, hidden_size: int, dtype: torch.dtype) -> None:
    x, _, weight = (place(t, loader) for t in inputs(hidden_size, dtype))
    before, y = x.clone(), poisoned(x.shape, dtype, loader)
    RmsNorm(loader, hidden_size=hidden_size, dtype=dtype).launch(x, weight, EPS, y)
    wanted = norm64(x, weight)
    assert relative_error(y, wanted) < ROUNDING[dtype]
    assert share_rounded_otherwise(y, wanted) < 0.005
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_add_then_norm(loader: KernelLoader, hidden_size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (place(t, loader) for t in inputs(hidden_size, dtype))
    sum_as_torch_rounds_it = residual + x
    y = poisoned(x.shape, dtype, loader)
    RmsNorm(loader, hidden_size=hidden_size, dtype=dtype).launch_add(x, residual, weight, EPS, y)
    assert torch.equal(residual, sum_as_torch_rounds_it)
    wanted = norm64(sum_as_torch_rounds_it, weight)
    assert relative_error(y, wanted) < ROUNDING[dtype]
    assert share_rounded_otherwise(y, wanted) < 0.005


def test_each_token_has_its_own_norm(loader: KernelLoader) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-4], [1.0], [1e4], [0.0]]
    )
    x, weight = place(x.bfloat16(), loader), place(torch.ones(64).bfloat16(), loader)
    y = poisoned(x.shape, torch.bfloat16, loader)
    RmsNorm(loader, hidden_size=64, dtype=torch.bfloat16).launch(x, weight, EPS, y)
    for mine, wanted in zip(y, norm64(x, weight), strict=True):
        assert relative_error(mine, wanted) < ROUNDING[torch.bfloat16]


def test_the_order_of_threads_does_not_matter(loaders: list[KernelLoader]) -> None:
    results = []
    for loader in loaders:
        x, residual, weight = (place(t, loader) for t in inputs(4096, torch.bfloat16))
        y = poisoned(x.shape, torch.bfloat16, loader)
        norm = RmsNorm(loader, hidden_size=4096, dtype=torch.bfloat16)
        norm.launch_add(x, residual, weight, EPS, y)
        results.append(y)
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)


def test_no_tokens(loader: KernelLoader) -> None:
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=loader.device)
    norm = RmsNorm(loader, hidden_size=64, dtype=torch.bfloat16)
    norm.launch(empty, place(torch.ones(64).bfloat16(), loader), EPS, empty)


@pytest.mark.parametrize("hidden_size", [0, 12, MAX_HIDDEN_SIZE + 8])
def test_sizes_without_a_kernel(loader: KernelLoader, hidden_size: int) -> None:
    with pytest.raises(ValueError, match=f"hidden size of {hidden_size}"):
        RmsNorm(loader, hidden_size=hidden_size, dtype=torch.bfloat16)


def test_dtypes_without_a_kernel(loader: KernelLoader) -> None:
    with pytest.raises(ValueError, match="float32"):
        RmsNorm(loader, hidden_size=64, dtype=torch.float32)


def test_the_variants_are_all_that_can_be_asked_for() -> None:
    asked = {
        rms_norm_source(hidden_size, dtype, add=add)
        for hidden_size in range(8, MAX_HIDDEN_SIZE + 1, 8)
        for dtype in ROUNDING
        for add in (False, True)
    }
    assert asked == set(VARIANTS)
