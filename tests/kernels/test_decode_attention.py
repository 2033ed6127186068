"""decode_attention.cu, with combine_partials.cu where rows are split, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch

from gpu.attention.splits import Splits, split
from gpu.kernels import KernelLoader
from gpu.kernels.combine_partials import CombinePartials
from gpu.kernels.decode_attention import DecodeAttention
from gpu.kernels.emulation import EmulatedLoader
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.paged_rows import PagedRows, attention_reference, make_rows

pytestmark = pytest.mark.every_arithmetic

E4M3 = torch.float8_e4m3fn
MAX_ERROR = {torch.bfloat16: 3e-3, torch.float16: 5e-4}


@attrs.frozen(kw_only=True)
class Case:
    """One random query for each row of a paged cache that is NaN wherever no token lives."""

    q: torch.Tensor  # [rows, num_heads, head_dim], a view into a larger tensor
    lengths: list[int]
    rows: PagedRows

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def take(self, order: Sequence[int]) -> Case:
        """Return some of the rows, in another order; the cache stays."""
        rows = attrs.evolve(
            self.rows,
            k=[self.rows.k[row] for row in order],
            v=[self.rows.v[row] for row in order],
            slots=self.rows.slots[list(order)],
        )
        q = self.q[list(order)].contiguous()
        return Case(q=q, lengths=[self.lengths[row] for row in order], rows=rows)

    def reference(self, window: int | None = None) -> torch.Tensor:
        """float64 [rows, num_heads, head_dim]; zeros for a row without positions."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            if length:
                out[row], _ = attention_reference(
                    self.q[row : row + 1].cpu(),
                    self.rows.k[row],
                    self.rows.v[row],
                    softmax_scale=self.scale,
                    position=length - 1,
                    window=window,
                )
        return out


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
    first_position: int = 0,
) -> Case:
    """Random rows; positions below ``first_position`` are in no page."""
    generator = torch.Generator().manual_seed(head_dim + group)
    rows = make_rows(
        loader,
        generator,
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        first_position=first_position,
    )
    # As in the model, the queries are the first heads of a wider row.
    qkv = torch.randn(len(lengths), (group + 2) * num_kv_heads, head_dim, generator=generator)
    q = place((qkv * query_size).to(dtype), loader)[:, : group * num_kv_heads]
    return Case(q=q, lengths=list(lengths), rows=rows)


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
    num_kv_heads, page_size = case.rows.k_cache.shape[1:3]
    decode = DecodeAttention(
        loader,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=case.q.dtype,
        cache_dtype=case.rows.k_cache.dtype,
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
        slots=case.rows.slots,
        block_tables=case.rows.block_tables,
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
    decode.launch(
        case.q, case.rows.k_cache, case.rows.v_cache, out, case.rows.k_scale, case.rows.v_scale
    )
    combine.launch(out)
    return out.cpu(), decode


def check(loader: KernelLoader, case: Case) -> None:
    """Whole rows, and split and whole rows together, give the reference."""
    reference = case.reference()
    for target in (1, len(case.lengths) + 9):
        splits = split(case.lengths, target_items=target)
        is_split = splits.items[:, 3] >= 0
        assert is_split.any() == (target > 1)
        assert not is_split.all()
        out, decode = run(loader, case, splits)
        assert relative_error(out, reference) < MAX_ERROR[case.q.dtype]
        if isinstance(loader, EmulatedLoader):
            assert decode.kernel.bank_conflicts == 0  # type: ignore[attr-defined]


LENGTHS = [1, 15, 16, 17, 64, 65, 700]


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype"),
    [
        (64, 1, 16, torch.bfloat16),
        (64, 8, 64, torch.float16),
        (80, 3, 32, torch.bfloat16),
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
def test_ring_is_refilled(loader: KernelLoader, cache_dtype: torch.dtype) -> None:
    """More tiles for a warp than the ring holds, in one small block that sanitizers can run."""
    case = make_case(loader, [630], head_dim=64, cache_dtype=cache_dtype, num_kv_heads=1, group=1)
    out, _ = run(loader, case, split(case.lengths, target_items=1, fixed_split=640), idle=0)
    assert relative_error(out, case.reference()) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_long_item(loader: KernelLoader, cache_dtype: torch.dtype) -> None:
    """More tiles for a warp than the page ids that it holds at once, twice over."""
    case = make_case(loader, [4500], head_dim=64, cache_dtype=cache_dtype, num_kv_heads=1, group=1)
    splits = split(case.lengths, target_items=1, fixed_split=4608)
    assert len(splits.items) == 1
    out, _ = run(loader, case, splits)
    assert relative_error(out, case.reference()) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_sliding_window(loader: KernelLoader, window: int, cache_dtype: torch.dtype) -> None:
    """Pages that all windows have left behind are gone."""
    lengths = [311, 333, 400, 555]
    case = make_case(
        loader, lengths, head_dim=64, cache_dtype=cache_dtype, first_position=311 - window
    )
    splits = split(case.lengths, target_items=12, window=window)
    out, _ = run(loader, case, splits)
    assert relative_error(out, case.reference(window)) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_large_scores(loader: KernelLoader, cache_dtype: torch.dtype) -> None:
    """Scores of several hundreds, of both signs: their exponentials fit into no float."""
    case = make_case(loader, [90, 400], head_dim=64, query_size=300, cache_dtype=cache_dtype)
    out, _ = run(loader, case, split(case.lengths, target_items=8))
    assert relative_error(out, case.reference()) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "smallest"), [(torch.bfloat16, -12), (torch.float16, -6), (torch.bfloat16, 3)]
)
def test_e4m3_values_of_many_sizes(loader: KernelLoader, dtype: torch.dtype, smallest: int) -> None:
    """Check values a billion times apart: weights stay within fp16."""
    case = make_case(loader, [48, 333], head_dim=128, dtype=dtype, cache_dtype=E4M3)
    rows = case.rows
    assert rows.v_scale is not None
    scale = rows.v_scale.cpu()
    for row, length in enumerate(case.lengths):
        factors = torch.logspace(smallest, smallest + 9, length)[torch.randperm(length)]
        rows.v[row].mul_(factors[:, None, None])
        for position, factor in enumerate(factors.tolist()):
            page = rows.page_ids[row][position // 16]
            scale[page, :, position % 16] *= factor
    rows.v_scale.copy_(scale)
    out, _ = run(loader, case, split(case.lengths, target_items=4))
    assert relative_error(out, case.reference()) < MAX_ERROR[dtype]


def test_e4m3_queries_of_any_size(loader: KernelLoader) -> None:
    """bf16 queries past fp16's largest number; small keys bring the scores back."""
    case = make_case(loader, [70], head_dim=64, query_size=1e6, cache_dtype=E4M3)
    assert case.rows.k_scale is not None
    case.rows.k_scale.mul_(1e-6)
    case.rows.k[0].mul_(1e-6)
    out, _ = run(loader, case, split(case.lengths, target_items=1))
    assert relative_error(out, case.reference()) < MAX_ERROR[torch.bfloat16]


def test_padded_rows_and_items_are_left_alone(loader: KernelLoader) -> None:
    case = make_case(loader, [200, 0, 30, 0], head_dim=64)
    case.rows.slots[1] = case.rows.slots[3] = -1
    splits = split(case.lengths, target_items=4)
    assert len(splits.items) > 2
    out, _ = run(loader, case, splits, idle=9)
    assert out[[1, 3]].isnan().all()
    assert relative_error(out[[0, 2]], case.reference()[[0, 2]]) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize(
    ("head_dim", "cache_dtype"), [(64, torch.bfloat16), (64, E4M3), (256, torch.bfloat16)]
)
def test_fewer_blocks_than_items(
    loader: KernelLoader, head_dim: int, cache_dtype: torch.dtype
) -> None:
    """Blocks that take several items give the same bits as blocks of one."""
    case = make_case(loader, [130, 700, 20], head_dim=head_dim, cache_dtype=cache_dtype)
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
        part = case.take(order)
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
