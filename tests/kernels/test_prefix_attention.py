"""Attention of groups of decode rows to shared prefixes, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu.attention.shared_prefix import PrefixGroups, prefix_items
from gpu.kernels import KernelLoader
from gpu.kernels.emulation import EmulatedLoader
from gpu.kernels.tiled_attention import PrefixAttention, tiled_attention_source
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.paged_rows import (
    along_first_element,
    attention_reference,
    make_rows,
    one_large_score,
    rising_scores,
)
from tests.support.rounding import sum_error

pytestmark = pytest.mark.every_arithmetic

ShapeRows = Callable[[torch.Tensor, torch.Tensor], None]
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOLERANCE = {BF16: 4e-3, FP16: 8e-4}


class Case:
    """A group of rows that shares whole pages, among other decode rows."""

    def __init__(
        self,
        loader: KernelLoader,
        *,
        num_rows: int = 9,
        shared_pages: int = 9,
        page_size: int = 16,
        num_kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = BF16,
        cache_dtype: torch.dtype | None = None,
        tile: int = 64,
        target_items: int = 1,
        **rows: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.loader = loader
        heads = num_kv_heads * group
        self.prefix_len = shared_pages * page_size
        lengths = [self.prefix_len + 1 + 5 * row for row in range(num_rows)]
        self.rows = make_rows(
            loader,
            generator,
            lengths,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            cache_dtype=cache_dtype,
            shared_pages=shared_pages,
            **rows,
        )
        self.softmax_scale = head_dim**-0.5
        choices = {"dtype": dtype, "cache_dtype": cache_dtype or dtype, "head_dim": head_dim}
        self.source = tiled_attention_source(shared_prefix=True, **choices, tile=tile)  # type: ignore[arg-type]
        self.kernel = PrefixAttention(
            loader,
            **choices,  # type: ignore[arg-type]
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            softmax_scale=self.softmax_scale,
            tile=tile,
        )
        qkv = torch.randn(num_rows, heads + 2 * num_kv_heads, head_dim, generator=generator)
        self.q = place(qkv.to(dtype), loader)[:, :heads]
        # All rows but the first, in no order; its pages must not be looked up.
        members = 1 + torch.randperm(num_rows - 1, generator=generator).numpy()
        self.rows.block_tables[self.rows.slots[0]] = 1 << 30
        self.plan = prefix_items(
            PrefixGroups(
                members=members,
                sizes=np.array([len(members)]),
                prefix_lens=np.array([self.prefix_len]),
            ),
            num_rows=num_rows,
            rows_per_tile=self.kernel.tokens_per_tile,
            target_items=target_items,
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Launch. Returns the partial results, and where each row's begin: one more than needed."""
        rows, plan, loader = self.rows, self.plan, self.loader
        start = np.concatenate([[0], np.cumsum(plan.num_partials + 1)])
        partial_out = poisoned((int(start[-1]), *self.q.shape[1:]), torch.float32, loader)
        partial_lse = poisoned((int(start[-1]), self.q.shape[1]), torch.float32, loader)
        # The grid is a bound; what stands in the items past num_items may be anything.
        items = np.full((len(plan.items) + 2, 5), 1 << 30, np.int32)
        items[: len(plan.items)] = plan.items
        self.kernel.prepare(
            items=place(torch.from_numpy(items), loader),
            num_items=place(torch.tensor([len(plan.items)], dtype=torch.int32), loader),
            members=place(torch.from_numpy(plan.members), loader),
            slots=rows.slots,
            block_tables=rows.block_tables,
            partial_start=place(torch.from_numpy(start).int(), loader),
            partial_out=partial_out,
            partial_lse=partial_lse,
        )
        self.kernel.launch(
            self.q, rows.k_cache, rows.v_cache, k_scale=rows.k_scale, v_scale=rows.v_scale
        )
        return partial_out.cpu(), partial_lse.cpu(), start

    def check(self, tolerance: float, *, largest_score: float = 0.0) -> None:
        """Compare the merged result of each row, and its log-sum-exp, with float64.

        A log-sum-exp is as large as ``largest_score``, a sum of four terms in float32: the product
        of the first elements, times the key's scale, times that of all scores, and a logarithm.
        """
        partial_out, partial_lse, start = self.run()
        merged, lse, references, reference_lse = [], [], [], []
        untouched = torch.ones(len(partial_lse), dtype=torch.bool)
        for row, (first, count) in enumerate(zip(start, self.plan.num_partials, strict=False)):
            if not count:
                continue
            untouched[first : first + count] = False
            parts = partial_lse[first : first + count].double() * np.log(2)
            weight = torch.softmax(parts, dim=0)[..., None]
            merged.append((weight * partial_out[first : first + count].double()).sum(0))
            lse.append(torch.logsumexp(parts, dim=0) / np.log(2))
            k, v = (x[row][: self.prefix_len] for x in (self.rows.k, self.rows.v))
            q = self.q[row : row + 1].cpu()
            out, own_lse = attention_reference(q, k, v, softmax_scale=self.softmax_scale)
            references.append(out[0])
            reference_lse.append(own_lse[0])
        assert relative_error(torch.stack(merged), torch.stack(references)) < tolerance
        lse_tolerance = 8 * tolerance + sum_error(4, largest_score)
        assert (torch.stack(lse) - torch.stack(reference_lse)).abs().max() < lse_tolerance
        assert partial_lse[untouched].isnan().all()
        assert partial_out[untouched].isnan().all()


@pytest.mark.parametrize(
    ("head_dim", "tile", "dtype"),
    [(64, 64, BF16), (80, 128, FP16), (96, 64, BF16), (128, 128, BF16), (256, 64, FP16)],
)
def test_head_sizes(loader: KernelLoader, head_dim: int, tile: int, dtype: torch.dtype) -> None:
    case = Case(loader, head_dim=head_dim, tile=tile, dtype=dtype)
    case.check(TOLERANCE[dtype])
    if isinstance(loader, EmulatedLoader):
        assert loader.load(case.source).bank_conflicts == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 2), (3, 2), (4, 1), (8, 1), (16, 1)])
def test_groups_in_several_tiles(loader: KernelLoader, group: int, num_kv_heads: int) -> None:
    """Up to three tiles of rows, the last not full."""
    case = Case(loader, group=group, num_kv_heads=num_kv_heads, num_rows=10, shared_pages=3)
    case.check(TOLERANCE[BF16])


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages(loader: KernelLoader, page_size: int) -> None:
    Case(loader, page_size=page_size, shared_pages=3).check(TOLERANCE[BF16])


@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
def test_splits(loader: KernelLoader, cache_dtype: torch.dtype) -> None:
    case = Case(
        loader, num_rows=3, shared_pages=17, page_size=32, target_items=8, cache_dtype=cache_dtype
    )
    assert sorted(case.plan.num_partials.tolist()) == [0, 3, 3]
    case.check(TOLERANCE[BF16])


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, FP16), (128, BF16)])
def test_e4m3_cache(loader: KernelLoader, head_dim: int, dtype: torch.dtype) -> None:
    case = Case(loader, head_dim=head_dim, dtype=dtype, cache_dtype=FP8, num_kv_heads=2)
    case.check(TOLERANCE[dtype])


@pytest.mark.parametrize(("shape_rows", "size"), [(rising_scores, 8.0), (one_large_score, 240.0)])
def test_e4m3_of_the_largest_values_in_half_precision(
    loader: KernelLoader, shape_rows: ShapeRows, size: float
) -> None:
    case = Case(loader, dtype=FP16, cache_dtype=FP8, shape_rows=shape_rows)
    along_first_element(case.q, size)
    case.check(TOLERANCE[FP16], largest_score=2.0**21)


def test_large_scores(loader: KernelLoader) -> None:
    Case(loader, size=30.0).check(TOLERANCE[BF16])


def test_without_items_nothing_is_written(loader: KernelLoader) -> None:
    case = Case(loader)
    case.plan.items.resize((0, 5), refcheck=False)
    partial_out, partial_lse, _ = case.run()
    assert partial_out.isnan().all()
    assert partial_lse.isnan().all()


def test_bits_do_not_depend_on_the_order_of_threads(loaders: list[KernelLoader]) -> None:
    results = [Case(each, head_dim=128, tile=128).run()[0] for each in loaders]
    assert all(torch.equal(results[0].nan_to_num(), each.nan_to_num()) for each in results[1:])
