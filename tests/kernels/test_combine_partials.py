"""combine_partials.cu against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from gpu.kernels import KernelLoader
from gpu.kernels.combine_partials import CombinePartials
from tests.kernels.memory import place, poisoned, relative_error

pytestmark = pytest.mark.every_arithmetic

NUM_HEADS = 6  # not a multiple of a block's heads


def make_partials(
    loader: KernelLoader, counts: Sequence[int], head_dim: int, *, spread: float = 4.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """partial_out, partial_lse and partial_start of rows with so many random partials each."""
    rng = torch.Generator().manual_seed(len(counts) + head_dim)
    total = sum(counts)
    out = torch.randn(total, NUM_HEADS, head_dim, generator=rng)
    lse = torch.randn(total, NUM_HEADS, generator=rng) * spread
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return place(out, loader), place(lse, loader), place(start, loader)


def combine(
    loader: KernelLoader,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """out [rows, NUM_HEADS, head_dim], NaN where the kernel wrote nothing."""
    partial_out, partial_lse, partial_start = partials
    num_rows, head_dim = len(partial_start) - 1, partial_out.shape[2]
    launcher = CombinePartials(loader, num_heads=NUM_HEADS, head_dim=head_dim, dtype=dtype)
    launcher.prepare(
        partial_out=partial_out,
        partial_lse=partial_lse,
        partial_start=partial_start,
        num_rows=num_rows,
    )
    out = poisoned((num_rows, NUM_HEADS, head_dim), dtype, loader)
    launcher.launch(out)
    return out.cpu()


def reference(partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """float64 [rows, NUM_HEADS, head_dim]; NaN for a row without partials."""
    out, lse, start = (tensor.cpu().double() for tensor in partials)
    rows = []
    for first, last in zip(start[:-1].int().tolist(), start[1:].int().tolist(), strict=True):
        weights = (lse[first:last] * math.log(2)).softmax(0)
        row = (weights[..., None].nan_to_num(0) * out[first:last]).sum(0)
        rows.append(row if last > first else torch.full_like(row, math.nan))
    return torch.stack(rows)


COUNTS = [2, 0, 1, 7, 8, 9, 0, 17, 31, 32, 33, 100]


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (80, torch.float16),
        (96, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.float16),
    ],
)
def test_rows_of_any_number_of_partials(
    loader: KernelLoader, head_dim: int, dtype: torch.dtype
) -> None:
    partials = make_partials(loader, COUNTS, head_dim)
    out, expected = combine(loader, partials, dtype), reference(partials)
    some = [row for row, count in enumerate(COUNTS) if count]
    assert relative_error(out[some], expected[some]) < (3e-3 if dtype == torch.bfloat16 else 5e-4)
    assert out[[row for row, count in enumerate(COUNTS) if not count]].isnan().all()


def test_log_sums_far_apart_and_without_keys(loader: KernelLoader) -> None:
    """Weights that underflow, parts without keys (-inf) before, between and after others."""
    partials = make_partials(loader, [3, 40, 2, 5], 64, spread=400.0)
    lse = partials[1]
    lse[0] = lse[20:30] = lse[42] = lse[47:] = -math.inf
    lse[3:36, 1] = -math.inf  # more than are read at once
    result = combine(loader, partials, torch.bfloat16)
    assert relative_error(result, reference(partials)) < 3e-3


def test_a_row_whose_parts_all_lack_keys_is_zero(loader: KernelLoader) -> None:
    partials = make_partials(loader, [3], 128)
    partials[1].fill_(-math.inf)
    assert (combine(loader, partials, torch.bfloat16) == 0).all()


def test_result_does_not_depend_on_the_order_of_threads(loaders: list[KernelLoader]) -> None:
    outs = []
    for loader in loaders:
        outs.append(combine(loader, make_partials(loader, [3, 40], 64), torch.float16))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_wrong_buffers_are_refused(loader: KernelLoader) -> None:
    launcher = CombinePartials(loader, num_heads=4, head_dim=64, dtype=torch.bfloat16)
    buffers = {
        "partial_out": torch.zeros(7, 4, 64),
        "partial_lse": torch.zeros(7, 4),
        "partial_start": torch.zeros(4, dtype=torch.int32),
    }
    launcher.prepare(**buffers, num_rows=3)
    for name, wrong in {
        "partial_out": torch.zeros(7, 4, 32),
        "partial_lse": torch.zeros(7, 5),
        "partial_start": torch.zeros(3, dtype=torch.int32),
    }.items():
        with pytest.raises(ValueError, match=name):
            launcher.prepare(**{**buffers, name: wrong}, num_rows=3)
    with pytest.raises(ValueError, match="head_dim"):
        CombinePartials(loader, num_heads=4, head_dim=72, dtype=torch.bfloat16)
