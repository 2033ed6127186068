"""Prefill attention against float64: chunks of rows over their paged contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gpu.attention.prefill_items import prefill_items
from gpu.kernels import KernelLoader
from gpu.kernels.emulation import EmulatedLoader
from gpu.kernels.tiled_attention import PrefillAttention, tiled_attention_source
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.paged_rows import (
    along_first_element,
    attention_reference,
    make_rows,
    one_large_score,
    rising_scores,
)

pytestmark = pytest.mark.every_arithmetic

ShapeRows = Callable[[torch.Tensor, torch.Tensor], None]
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOLERANCE = {BF16: 4e-3, FP16: 8e-4}


class Case:
    """Rows of queries, and what the kernel makes of them."""

    def __init__(
        self,
        loader: KernelLoader,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        dtype: torch.dtype = BF16,
        cache_dtype: torch.dtype | None = None,
        num_kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 64,
        page_size: int = 16,
        tile: int = 64,
        window: int | None = None,
        num_blocks: int = 0,
        seed: int = 0,
        **rows: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.loader, self.window = loader, window
        self.query_lens, self.context_lens = query_lens, context_lens
        self.rows = make_rows(
            loader,
            generator,
            context_lens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            cache_dtype=cache_dtype,
            **rows,
        )
        self.softmax_scale = head_dim**-0.5
        self.source = tiled_attention_source(
            shared_prefix=False,
            dtype=dtype,
            cache_dtype=cache_dtype or dtype,
            head_dim=head_dim,
            tile=tile,
        )
        self.kernel = PrefillAttention(
            loader,
            dtype=dtype,
            cache_dtype=cache_dtype or dtype,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            softmax_scale=self.softmax_scale,
            tile=tile,
        )
        heads = num_kv_heads * group
        self.start = np.concatenate([[0], np.cumsum(query_lens)])
        qkv = torch.randn(
            int(self.start[-1]), heads + 2 * num_kv_heads, head_dim, generator=generator
        )
        self.q = place(qkv.to(dtype), loader)[:, :heads]
        self.plan = prefill_items(
            np.array(query_lens),
            np.array(context_lens),
            tokens_per_tile=self.kernel.tokens_per_tile,
            num_kv_heads=num_kv_heads,
            num_blocks=num_blocks,
            max_partials=1 << 20,
        )

    def run(self) -> torch.Tensor:
        """Launch; splits are merged in float64."""
        rows, loader = self.rows, self.loader
        out = poisoned(tuple(self.q.shape), self.q.dtype, loader)
        partial_start = np.concatenate([[0], np.cumsum(self.plan.num_partials)])
        total = int(partial_start[-1])
        partial_out = poisoned((total, *self.q.shape[1:]), torch.float32, loader)
        partial_lse = poisoned((total, self.q.shape[1]), torch.float32, loader)
        self.kernel.prepare(
            items=place(torch.from_numpy(self.plan.items), loader),
            num_items=len(self.plan.items),
            query_start=place(torch.from_numpy(self.start).int(), loader),
            context_lens=place(torch.tensor(self.context_lens, dtype=torch.int32), loader),
            slots=rows.slots,
            block_tables=rows.block_tables,
            partial_start=place(torch.from_numpy(partial_start).int(), loader),
            partial_out=partial_out,
            partial_lse=partial_lse,
        )
        self.kernel.launch(
            self.q,
            rows.k_cache,
            rows.v_cache,
            out,
            window=self.window,
            k_scale=rows.k_scale,
            v_scale=rows.v_scale,
        )
        merged = out.cpu().clone()
        for token, (first, last) in enumerate(pairwise(partial_start)):
            if first < last:
                weight = torch.softmax(partial_lse[first:last].cpu().double() * np.log(2), dim=0)
                parts = partial_out[first:last].cpu().double()
                merged[token] = (weight[..., None] * parts).sum(0).to(out.dtype)
        return merged

    def reference(self) -> torch.Tensor:
        """Return the result in float64."""
        results = []
        for row, (n, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            q = self.q[self.start[row] : self.start[row + 1]].cpu()
            k, v = self.rows.k[row], self.rows.v[row]
            results.append(
                attention_reference(
                    q,
                    k,
                    v,
                    softmax_scale=self.softmax_scale,
                    position=length - n,
                    window=self.window,
                )[0]
            )
        return torch.cat(results)

    def error(self) -> float:
        """Return how far the kernel is from float64."""
        return relative_error(self.run(), self.reference())


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(loader: KernelLoader, head_dim: int, tile: int) -> None:
    case = Case(loader, [70], [150], head_dim=head_dim, tile=tile)
    assert case.error() < TOLERANCE[BF16]
    if isinstance(loader, EmulatedLoader):
        assert loader.load(case.source).bank_conflicts == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("group", "num_kv_heads"), [(1, 2), (2, 1), (3, 2), (4, 1), (8, 1), (16, 1)]
)
def test_groups(loader: KernelLoader, group: int, num_kv_heads: int) -> None:
    case = Case(loader, [29, 3], [61, 40], group=group, num_kv_heads=num_kv_heads)
    assert case.error() < TOLERANCE[BF16]


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages(loader: KernelLoader, page_size: int) -> None:
    case = Case(loader, [33, 40], [131, 40], page_size=page_size)
    assert case.error() < TOLERANCE[BF16]


def test_chunks_at_start_middle_and_of_one_token(loader: KernelLoader) -> None:
    """Row after row: a whole prompt, its middle, one token, one token that is all, a full page."""
    case = Case(loader, [50, 37, 1, 1, 16], [50, 100, 129, 1, 64])
    assert case.error() < TOLERANCE[BF16]


def test_rows_that_share_the_pages_of_a_prefix(loader: KernelLoader) -> None:
    case = Case(loader, [20, 45, 7], [68, 93, 55], shared_pages=3)
    assert case.error() < TOLERANCE[BF16]


@pytest.mark.parametrize("head_dim", [64, 256])
def test_half_precision(loader: KernelLoader, head_dim: int) -> None:
    case = Case(loader, [40], [130], head_dim=head_dim, dtype=FP16)
    assert case.error() < TOLERANCE[FP16]


@pytest.mark.parametrize(
    ("window", "forgotten"),
    [(1, 90), (7, 84), (40, 48), (64, 24), (100, 0), (1000, 0)],
)
def test_windows(loader: KernelLoader, window: int, forgotten: int) -> None:
    """Narrower than the chunk and the tile, as wide, wider; pages that it left are gone."""
    case = Case(loader, [60], [150], window=window, first_position=forgotten)
    assert case.error() < TOLERANCE[BF16]


@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_small_and_large_scores(loader: KernelLoader, size: float) -> None:
    """Check scores up to some hundreds, where most weights are 0, and then equal scores."""
    case = Case(loader, [40], [140], size=size)
    assert case.error() < TOLERANCE[BF16]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tile"),
    [(64, BF16, 64), (80, BF16, 64), (96, FP16, 128), (128, BF16, 128), (256, FP16, 64)],
)
def test_e4m3_cache(loader: KernelLoader, head_dim: int, dtype: torch.dtype, tile: int) -> None:
    """Against float64 on the dequantized keys and values: no error but that of the arithmetic."""
    case = Case(
        loader,
        [30, 5],
        [135, 41],
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=FP8,
        tile=tile,
        num_kv_heads=2,
        page_size=32,
    )
    assert case.error() < TOLERANCE[dtype]


def test_e4m3_of_tiny_values_in_half_precision(loader: KernelLoader) -> None:
    """Scales far below the smallest normal half."""
    case = Case(loader, [20], [90], dtype=FP16, cache_dtype=FP8, size=1e-3)
    assert case.error() < TOLERANCE[FP16]


@pytest.mark.parametrize(("shape_rows", "size"), [(rising_scores, 8.0), (one_large_score, 240.0)])
@pytest.mark.parametrize("tile", [64, 128])
def test_e4m3_of_the_largest_values_in_half_precision(
    loader: KernelLoader, tile: int, shape_rows: ShapeRows, size: float
) -> None:
    """Check that a weight times its token's largest value, packed as a half, stays finite."""
    case = Case(loader, [40], [140], dtype=FP16, cache_dtype=FP8, tile=tile, shape_rows=shape_rows)
    along_first_element(case.q, size)
    assert case.error() < TOLERANCE[FP16]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
def test_splits(loader: KernelLoader, cache_dtype: torch.dtype, window: int | None) -> None:
    """Check a short chunk over a long context split over blocks; a window empties most."""
    case = Case(loader, [5, 40], [1100, 41], cache_dtype=cache_dtype, window=window, num_blocks=16)
    assert case.plan.num_partials[0] == 3
    assert case.plan.num_partials[5] == 0
    assert case.error() < TOLERANCE[BF16]


@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
def test_bits_do_not_depend_on_the_order_of_threads(
    loaders: list[KernelLoader], cache_dtype: torch.dtype
) -> None:
    results = [
        Case(each, [70], [150], head_dim=128, tile=128, cache_dtype=cache_dtype).run()
        for each in loaders
    ]
    assert all(torch.equal(results[0], each) for each in results[1:])


def test_what_the_kernel_is_not_built_for_is_refused(loader: KernelLoader) -> None:
    good = {
        "dtype": BF16,
        "cache_dtype": BF16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "softmax_scale": 0.125,
        "tile": 64,
    }
    for name, value in [
        ("dtype", torch.float32),
        ("cache_dtype", FP16),
        ("num_heads", 5),
        ("num_heads", 34),
        ("head_dim", 72),
        ("page_size", 128),
        ("tile", 32),
    ]:
        with pytest.raises(ValueError, match="must"):
            PrefillAttention(loader, **{**good, name: value})  # type: ignore[arg-type]
