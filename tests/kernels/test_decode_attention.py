"""decode_attention.cu, with combine_partials.cu where rows are split, against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch

from gpu.attention.splits import Splits, split
from gpu.emulation import EmulatedLoader
from gpu.kernels import KernelLoader
from gpu.kernels.combine_partials import CombinePartials
from gpu.kernels.decode_attention import DecodeAttention
from tests.kernels.memory import place, poisoned, poisoned_cache, relative_error

E4M3 = torch.float8_e4m3fn
NAN = math.nan
MAX_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@attrs.frozen(kw_only=True)
class Case:
    """Random queries and a paged cache, NaN wherever no token lives, and the float64 result."""

    q: torch.Tensor  # [rows, num_heads, head_dim], a view into a larger tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    block_tables: torch.Tensor
    slots: torch.Tensor
    lengths: list[int]
    keys: list[torch.Tensor]  # float64 [length, num_kv_heads, head_dim], each as the cache has it
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def rows(self, order: Sequence[int]) -> Case:
        """The case of some of the rows, in another order; the cache stays."""
        return attrs.evolve(
            self,
            q=self.q[list(order)].contiguous(),
            slots=self.slots[list(order)],
            lengths=[self.lengths[row] for row in order],
            keys=[self.keys[row] for row in order],
            values=[self.values[row] for row in order],
        )

    def reference(self, window: int | None = None) -> torch.Tensor:
        """float64 [rows, num_heads, head_dim]; zeros for a row without positions."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.k_cache.shape[1]
        for row, length in enumerate(self.lengths):
            if length:
                first = max(length - window, 0) if window else 0
                k = self.keys[row][first:].repeat_interleave(group, dim=1)
                v = self.values[row][first:].repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,thd->ht", self.q[row].double().cpu(), k) * self.scale
                out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        return out


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and its scales over the last dimension."""
    largest = x.abs().amax(-1)
    scale = torch.where(largest > 0, largest / 448, 1.0)
    return (x / scale[..., None]).to(E4M3), scale


def make_case(
    loader: KernelLoader,
    lengths: Sequence[int],
    *,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    group: int = 4,
    num_kv_heads: int = 2,
    page_size: int = 16,
    query_size: float = 1.5,
    value_sizes: bool = False,
    seed: int = 0,
) -> Case:
    """Rows of random keys and values over pages in random order.

    With ``value_sizes`` the values of each token have a size of their own, from 1e-6 to 1e3.
    """
    rng = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    used = [-(-length // page_size) for length in lengths]
    num_pages = sum(used) + 2
    page_ids = torch.randperm(num_pages, generator=rng, dtype=torch.int32)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    caches = [torch.full(shape, NAN).to(cache_dtype) for _ in range(2)]
    scales = [torch.full(shape[:3], NAN) for _ in range(2)]
    num_slots = len(lengths) + 2
    slots = torch.randperm(num_slots, generator=rng, dtype=torch.int32)[: len(lengths)]
    tables = torch.full((num_slots, max(used) + 1), 2**30, dtype=torch.int32)
    kept: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    first_page = 0
    for slot, length, pages in zip(slots.tolist(), lengths, used, strict=True):
        own = page_ids[first_page : first_page + pages]
        first_page += pages
        tables[slot, :pages] = own
        positions = torch.arange(length)
        page, offset = own[positions // page_size].long(), positions % page_size
        for cache, scale, keep in zip(caches, scales, kept, strict=True):
            x = torch.randn(length, num_kv_heads, head_dim, generator=rng)
            if value_sizes and cache is caches[1]:
                x *= 10 ** (torch.rand(length, num_kv_heads, 1, generator=rng) * 9 - 6)
            if cache_dtype == E4M3:
                codes, factors = quantized(x)
                cache.view(torch.uint8)[page, :, offset] = codes.view(torch.uint8)
                scale[page, :, offset] = factors
                keep.append(codes.double() * factors.double()[..., None])
            else:
                cache[page, :, offset] = x.to(dtype)
                keep.append(x.to(dtype).double())
    # As in the model, the queries are the first heads of a wider row.
    qkv = torch.randn(len(lengths), (group + 2) * num_kv_heads, head_dim, generator=rng)
    placed = poisoned_cache(
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=cache_dtype,
        loader=loader,
    )
    for to, cache in zip(placed, caches, strict=True):
        to.view(torch.uint8).copy_(cache.view(torch.uint8))
    return Case(
        q=place((qkv * query_size).to(dtype), loader)[:, : group * num_kv_heads],
        k_cache=placed[0],
        v_cache=placed[1],
        k_scale=place(scales[0], loader) if cache_dtype == E4M3 else None,
        v_scale=place(scales[1], loader) if cache_dtype == E4M3 else None,
        block_tables=place(tables, loader),
        slots=place(slots, loader),
        lengths=list(lengths),
        keys=kept[0],
        values=kept[1],
    )


def run(
    loader: KernelLoader,
    case: Case,
    splits: Splits,
    *,
    idle: int = 3,
    max_blocks: int | None = None,
) -> tuple[torch.Tensor, DecodeAttention]:
    """out [rows, num_heads, head_dim] and the launcher, over ``idle`` items more than there are."""
    rows, num_heads, head_dim = case.q.shape
    num_kv_heads, page_size = case.k_cache.shape[1:3]
    decode = DecodeAttention(
        loader,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=case.q.dtype,
        cache_dtype=case.k_cache.dtype,
        scale=case.scale,
    )
    combine = CombinePartials(loader, num_heads=num_heads, head_dim=head_dim, dtype=case.q.dtype)
    padding = np.full((idle, 4), 2**30, dtype=np.int32)
    items = place(torch.from_numpy(np.concatenate([splits.items, padding])), loader)
    num_items = place(torch.tensor([len(splits.items)], dtype=torch.int32), loader)
    partial_start = place(torch.from_numpy(splits.partial_start), loader)
    partial_out = poisoned((splits.num_partials, num_heads, head_dim), torch.float32, loader)
    partial_lse = poisoned((splits.num_partials, num_heads), torch.float32, loader)
    decode.prepare(
        slots=case.slots,
        block_tables=case.block_tables,
        items=items,
        num_items=num_items,
        partial_out=partial_out,
        partial_lse=partial_lse,
        max_blocks=max_blocks,
    )
    combine.prepare(
        partial_out=partial_out,
        partial_lse=partial_lse,
        partial_start=partial_start,
        num_rows=rows,
    )
    out = poisoned((rows, num_heads, head_dim), case.q.dtype, loader)
    decode.launch(case.q, case.k_cache, case.v_cache, out, case.k_scale, case.v_scale)
    combine.launch(out)
    return out.cpu(), decode


def check(loader: KernelLoader, case: Case, *, window: int | None = None) -> None:
    """Split and whole rows in one batch give the reference."""
    splits = split(case.lengths, target_items=len(case.lengths) + 9, window=window)
    assert {-1} < set(splits.items[:, 3].tolist())
    out, decode = run(loader, case, splits)
    assert relative_error(out, case.reference(window)) < MAX_ERROR[case.q.dtype]
    if isinstance(loader, EmulatedLoader):
        assert decode.kernel.bank_conflicts == 0  # type: ignore[attr-defined]


LENGTHS = [1, 15, 16, 17, 64, 65, 700]


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype"),
    [
        (64, 3, 16, torch.bfloat16),
        (64, 8, 64, torch.float16),
        (80, 1, 32, torch.bfloat16),
        (96, 7, 64, torch.bfloat16),
        (128, 4, 16, torch.bfloat16),
        (128, 16, 32, torch.float16),
        (256, 2, 32, torch.bfloat16),
    ],
)
def test_ragged_rows(
    loader: KernelLoader, head_dim: int, group: int, page_size: int, dtype: torch.dtype
) -> None:
    check(
        loader,
        make_case(
            loader, LENGTHS, head_dim=head_dim, group=group, page_size=page_size, dtype=dtype
        ),
    )


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype"),
    [
        (64, 8, 32, torch.bfloat16),
        (80, 3, 16, torch.float16),
        (96, 1, 64, torch.bfloat16),
        (128, 4, 64, torch.bfloat16),
        (128, 16, 16, torch.float16),
        (256, 2, 16, torch.bfloat16),
    ],
)
def test_e4m3_cache(
    loader: KernelLoader, head_dim: int, group: int, page_size: int, dtype: torch.dtype
) -> None:
    case = make_case(
        loader,
        LENGTHS,
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        dtype=dtype,
        cache_dtype=E4M3,
    )
    check(loader, case)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_sliding_window(loader: KernelLoader, window: int, cache_dtype: torch.dtype) -> None:
    case = make_case(loader, [1, 33, 300, 555], head_dim=64, cache_dtype=cache_dtype)
    splits = split(case.lengths, target_items=12, window=window)
    out, _ = run(loader, case, splits)
    assert relative_error(out, case.reference(window)) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_large_scores(loader: KernelLoader, cache_dtype: torch.dtype) -> None:
    """Scores of several hundreds, of both signs: their exponentials fit into no float."""
    case = make_case(loader, [90, 400], head_dim=64, query_size=300, cache_dtype=cache_dtype)
    out, _ = run(loader, case, split(case.lengths, target_items=8))
    reference = case.reference()
    # Rounding of the products shifts large scores by more: what is checked is that none overflows.
    assert relative_error(out, reference) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e4m3_values_of_many_sizes(loader: KernelLoader, dtype: torch.dtype) -> None:
    """Tokens whose values are a billion times apart: weights stay within fp16."""
    case = make_case(
        loader, [48, 333], head_dim=128, dtype=dtype, cache_dtype=E4M3, value_sizes=True
    )
    out, _ = run(loader, case, split(case.lengths, target_items=4))
    reference = case.reference()
    if dtype == torch.float16:  # the rest would be subnormal
        assert reference.abs().median() > 1e-3
    assert relative_error(out, reference) < MAX_ERROR[dtype]


def test_e4m3_queries_of_any_size(loader: KernelLoader) -> None:
    """bf16 queries past fp16's largest number; small keys bring the scores back."""
    case = make_case(loader, [70], head_dim=64, query_size=1e6, cache_dtype=E4M3)
    assert case.k_scale is not None
    case.k_scale.mul_(1e-6)
    case = attrs.evolve(case, keys=[k * 1e-6 for k in case.keys])
    out, _ = run(loader, case, split(case.lengths, target_items=1))
    assert relative_error(out, case.reference()) < MAX_ERROR[torch.bfloat16]


def test_padded_rows_and_items_are_left_alone(loader: KernelLoader) -> None:
    case = make_case(loader, [200, 0, 30, 0], head_dim=64)
    case.slots[1] = case.slots[3] = -1
    splits = split(case.lengths, target_items=4)
    assert len(splits.items) > 2
    out, _ = run(loader, case, splits, idle=9)
    assert out[[1, 3]].isnan().all()
    assert relative_error(out[[0, 2]], case.reference()[[0, 2]]) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_fewer_blocks_than_items(loader: KernelLoader, cache_dtype: torch.dtype) -> None:
    """Blocks that take several items give the same bits as blocks of one."""
    case = make_case(loader, [130, 700, 20], head_dim=64, cache_dtype=cache_dtype)
    splits = split(case.lengths, target_items=9)
    one_each, _ = run(loader, case, splits)
    several, _ = run(loader, case, splits, max_blocks=2)
    assert torch.equal(one_each, several)
    assert relative_error(several, case.reference()) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("window", [None, 200])
def test_fixed_split_gives_the_same_bits_in_any_batch(
    loader: KernelLoader, window: int | None, cache_dtype: torch.dtype
) -> None:
    lengths = [411, 1, 700, 64, 128, 129, 300]
    case = make_case(loader, lengths, head_dim=64, cache_dtype=cache_dtype)

    def out(order: Sequence[int]) -> torch.Tensor:
        part = case.rows(order)
        splits = split(part.lengths, target_items=4, window=window, fixed_split=128)
        return run(loader, part, splits)[0]

    together = out(range(7))
    assert relative_error(together, case.reference(window)) < MAX_ERROR[torch.bfloat16]
    order = [5, 2, 6, 0, 4, 1, 3]
    assert torch.equal(out(order), together[order])
    for row in (0, 2, 4):
        assert torch.equal(out([row]), together[[row]])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_result_does_not_depend_on_the_order_of_threads(
    loaders: list[KernelLoader], cache_dtype: torch.dtype
) -> None:
    outs = []
    for loader in loaders:
        case = make_case(loader, [1, 70, 500], head_dim=128, cache_dtype=cache_dtype)
        outs.append(run(loader, case, split(case.lengths, target_items=9))[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_wrong_buffers_are_refused(loader: KernelLoader) -> None:
    decode = DecodeAttention(
        loader,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        scale=0.125,
    )
    buffers = {
        "slots": torch.zeros(3, dtype=torch.int32),
        "block_tables": torch.zeros(3, 5, dtype=torch.int32),
        "items": torch.zeros(7, 4, dtype=torch.int32),
        "num_items": torch.zeros(1, dtype=torch.int32),
        "partial_out": torch.zeros(7, 8, 64),
        "partial_lse": torch.zeros(7, 8),
    }
    decode.prepare(**buffers)
    for name, wrong in {
        "slots": torch.zeros(3),
        "block_tables": torch.zeros(3, dtype=torch.int32),
        "items": torch.zeros(7, 3, dtype=torch.int32),
        "num_items": torch.zeros(1, dtype=torch.int64),
        "partial_out": torch.zeros(7, 8, 80),
        "partial_lse": torch.zeros(6, 8),
    }.items():
        with pytest.raises(ValueError, match=name):
            decode.prepare(**{**buffers, name: wrong})
