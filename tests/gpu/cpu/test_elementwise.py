"""The compiled small operations against float64, and against torch's, which round alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.cpu.elementwise import CompiledOperations
from gpu.models.operations.torch_ops import TorchOperations

pytestmark = pytest.mark.single_kernels

EPS = 1e-5
TORCH = TorchOperations()
# Of real models, and such that the last vector isn't full.
WIDTHS = (576, 1536, 32, 16, 1, 17, 300, 4096)


@pytest.fixture(scope="module")
def pools(each_isa: str) -> Iterator[list[CompiledOperations]]:
    """On one, two and three threads."""
    made = [CompiledOperations(threads) for threads in (1, 2, 3)]
    yield made
    for pool in made:
        pool.close()


def random(*size: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * spread).bfloat16()


def check_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """``actual`` is ``expected``, float64, rounded once; float32 may tip a tie."""
    error = (actual.double() - expected).abs()
    assert (error <= expected.abs() * (2**-8 + 2**-16) + 1e-30).all()


def on_all(
    pools: list[CompiledOperations], compute: Callable[[CompiledOperations], torch.Tensor]
) -> torch.Tensor:
    """Return the result, which is the same bits on any number of threads."""
    results = [compute(pool) for pool in pools]
    for result in results[1:]:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))
    return results[0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rms_norm(pools: list[CompiledOperations], rows: int, width: int) -> None:
    x, weight = random(rows, width, spread=3), random(width, seed=1)
    y = on_all(pools, lambda pool: pool.rms_norm(x, weight, EPS))
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    check_rounded(y, exact * weight.double())
    different = (y != TORCH.rms_norm(x, weight, EPS)).float().mean()
    assert different < 0.01  # ties that another order of summing tips


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_add_rms_norm(pools: list[CompiledOperations], rows: int, width: int) -> None:
    x, residual, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
    sums = []

    def compute(pool: CompiledOperations) -> torch.Tensor:
        sums.append(residual.clone())
        return pool.add_rms_norm(x, sums[-1], weight, EPS)

    y = on_all(pools, compute)
    expected_sum = residual.clone()
    expected = TORCH.add_rms_norm(x, expected_sum, weight, EPS)
    assert all(torch.equal(each, expected_sum) for each in sums)
    assert torch.equal(y, on_all(pools, lambda pool: pool.rms_norm(expected_sum, weight, EPS)))
    assert (y != expected).float().mean() < 0.01


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_silu_mul(pools: list[CompiledOperations], rows: int, width: int) -> None:
    gate_up = random(rows, 2 * width, spread=5)
    y = on_all(pools, lambda pool: pool.silu_mul(gate_up))
    gate, up = gate_up.double().chunk(2, dim=-1)
    silu = gate * torch.sigmoid(gate)
    error = (y.double() - silu * up).abs()
    assert (error <= (silu * up).abs() * 2**-7 * 1.01 + 1e-30).all()  # rounded twice
    assert (y != TORCH.silu_mul(gate_up)).float().mean() < 0.01


def test_silu_far_out(pools: list[CompiledOperations]) -> None:
    gates = [-3e38, -1000.0, -100.0, -88.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 88.0, 3e38]
    gate = torch.tensor([gates]).bfloat16()
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    y, expected = pools[0].silu_mul(gate_up), TORCH.silu_mul(gate_up)
    assert torch.allclose(y.double(), expected.double(), rtol=2**-8, atol=1e-35)


def test_norms_and_gates_hand_nan_on(pools: list[CompiledOperations]) -> None:
    x = random(3, 64)
    x[1, 5] = torch.nan
    normed = pools[0].rms_norm(x, random(64, seed=1), EPS)
    assert normed.isnan().all(dim=1).tolist() == [False, True, False]
    gated = pools[0].silu_mul(x)
    assert gated.isnan().nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_gather_rows(pools: list[CompiledOperations], rows: int) -> None:
    table = random(50, 37)
    ids = torch.arange(rows, dtype=torch.int32) * 7 % 50
    assert torch.equal(on_all(pools, lambda pool: pool.gather_rows(table, ids)), table[ids.long()])


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan])


@settings(max_examples=200, deadline=None)
@given(
    width=st.sampled_from([1, 5, 16, 31, 64, 1000]),
    rows=st.integers(1, 4),
    placed=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 999), SPECIAL), max_size=8),
    background=st.sampled_from([-np.inf, -3.0, 0.0, None]),
)
def test_argmax_is_numpys(
    pools: list[CompiledOperations],
    width: int,
    rows: int,
    placed: list[tuple[int, int, float]],
    background: float | None,
) -> None:
    x = np.full((rows, width), 0 if background is None else background, dtype=np.float32)
    if background is None:
        x[:] = np.random.default_rng(rows).normal(size=x.shape)
    for row, column, value in placed:
        x[row % rows, column % width] = value
    best = on_all(pools, lambda pool: pool.argmax_rows(torch.from_numpy(x)))
    assert best.tolist() == x.argmax(axis=1).tolist()
