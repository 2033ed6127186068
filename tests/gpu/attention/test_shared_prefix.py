"""Shared prefixes of decode rows: against plain loops over sets of rows."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.attention.shared_prefix import (
    MIN_SPLIT,
    PrefixCost,
    max_prefix_items,
    prefix_groups,
    prefix_tile,
    shared_prefixes,
)
from gpu.attention.splits import split

PAGE_SIZE = 16


def cost(rows_per_tile: int = 16, **changes: float) -> PrefixCost:
    """Return a model of 32 query and 8 kv heads."""
    return PrefixCost(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        cache_bytes=2,
        rows_per_tile=rows_per_tile,
        **changes,  # type: ignore[arg-type]
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Block tables of rows that branch off one another at random, and their context lengths."""
    num_rows = draw(st.integers(1, 24))
    width = draw(st.sampled_from([1, 3, 40]))
    tables = np.zeros((num_rows, width), np.int32)
    lengths = np.zeros(num_rows, np.int64)
    fresh = 0
    for row in range(num_rows):
        kept = draw(st.integers(0, width))
        parent = draw(st.integers(0, row))
        tables[row] = tables[parent]
        tables[row, kept:] = np.arange(fresh + 1, fresh + 1 + width - kept)
        fresh += width
        # Past a row's last page stands anything, often what another row has there.
        lengths[row] = draw(st.integers(0, width * PAGE_SIZE))
    return tables, lengths


def most_saved(
    tables: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], c: PrefixCost
) -> float:
    """Return the saving of the best groups, by trying every node of the tree with plain loops."""
    whole = [max(int(n) - 1, 0) // PAGE_SIZE for n in lengths]

    def below(rows: list[int], depth: int) -> float:
        children: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            if whole[row] > depth:
                children[int(tables[row, depth])].append(row)
        return sum(best(child, depth + 1) for child in children.values() if len(child) > 1)

    def best(rows: list[int], depth: int) -> float:
        own = c.saved(np.array([len(rows)]), np.array([depth * PAGE_SIZE]))
        return max(float(own[0]), below(rows, depth))

    return below(list(range(len(lengths))), 0)


@given(batch=batches(), rows_per_tile=st.sampled_from([4, 42, 128]), launch=st.sampled_from([0, 1]))
def test_groups_save_the_most_that_any_choice_does(
    batch: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]], rows_per_tile: int, launch: int
) -> None:
    tables, lengths = batch
    c = cost(rows_per_tile, launch=launch * 1e-7)
    groups = prefix_groups(tables, lengths, page_size=PAGE_SIZE, cost=c)
    best = most_saved(tables, lengths, c)
    assert float(c.saved(groups.sizes, groups.prefix_lens).sum()) == pytest.approx(
        best if best > c.launch else 0
    )


@given(batch=batches(), rows_per_tile=st.sampled_from([1, 4, 21]), target_items=st.integers(1, 40))
def test_prefix_and_rest_cover_every_position_once(
    batch: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]],
    rows_per_tile: int,
    target_items: int,
) -> None:
    tables, lengths = batch
    # With neither arithmetic nor launches, whatever is shared pays.
    plan = shared_prefixes(
        tables,
        lengths,
        page_size=PAGE_SIZE,
        cost=cost(rows_per_tile, arithmetic=np.inf, launch=0.0, bandwidth=1e9),
        target_items=target_items,
    )
    rest = split(
        lengths, target_items=target_items, begin=plan.prefix_lens, reserved=plan.num_partials
    )
    seen = [np.zeros(n, int) for n in lengths]
    partials = [np.zeros(0, int) for _ in lengths]
    for first, count, begin, end, index in plan.items.tolist():
        assert 0 < count <= rows_per_tile
        assert begin < end
        rows = plan.members[first : first + count].tolist()
        for row in rows:
            seen[row][begin:end] += 1
            assert index < plan.num_partials[row]
            partials[row] = np.append(partials[row], rest.partial_start[row] + index)
            # The kernel takes the pages of the first row.
            pages = slice(0, -(-end // PAGE_SIZE))
            assert (tables[row, pages] == tables[rows[0], pages]).all()
    for row, begin, end, partial in rest.items.tolist():
        seen[row][begin:end] += 1
        partials[row] = np.append(partials[row], partial)
    for row, count in enumerate(seen):
        assert (count == 1).all()
        own = range(rest.partial_start[row], rest.partial_start[row + 1])
        # A row without partial results writes its output itself, in one item.
        assert sorted(partials[row]) == list(own) or (not own and len(partials[row]) <= 1)
    limit = max_prefix_items(len(lengths), target_items)
    if rows_per_tile > 1:
        assert len(plan.items) <= limit
        assert int(plan.num_partials.sum()) <= limit * rows_per_tile


def chat_batch(num_rows: int, shared: int, own: int) -> tuple[npt.NDArray[np.int32], ...]:
    """Rows that share so many pages and have so many of their own."""
    tables = np.arange(num_rows * (shared + own), dtype=np.int32).reshape(num_rows, -1)
    tables[:, :shared] = tables[0, :shared]
    return tables, np.full(num_rows, (shared + own) * PAGE_SIZE)


def test_a_long_prefix_of_many_rows_is_read_once() -> None:
    tables, lengths = chat_batch(64, 128, 4)
    plan = shared_prefixes(
        tables, lengths, page_size=PAGE_SIZE, cost=cost(32), target_items=2 * 132 // 8
    )
    assert (plan.prefix_lens == 2048).all()
    assert sorted(plan.members.tolist()) == list(range(64))
    # Two tiles of rows, in splits that fill the GPU about once.
    assert len(plan.items) == 2 * 8
    assert (plan.items[:, 3] - plan.items[:, 2] == MIN_SPLIT).all()


def test_what_saves_less_than_a_launch_is_left_alone() -> None:
    tables, lengths = chat_batch(2, 8, 4)
    plan = shared_prefixes(tables, lengths, page_size=PAGE_SIZE, cost=cost(), target_items=33)
    assert not len(plan.items)
    assert not plan.prefix_lens.any()
    assert not plan.num_partials.any()


def test_padded_rows_and_rows_of_one_token_share_nothing() -> None:
    tables, _ = chat_batch(64, 128, 4)
    for length in (0, 1, PAGE_SIZE):
        lengths = np.full(64, length)
        plan = shared_prefixes(tables, lengths, page_size=PAGE_SIZE, cost=cost(), target_items=33)
        assert not len(plan.items)


def test_a_wide_tile_is_for_many_rows() -> None:
    assert prefix_tile(32, 4) == 64
    assert prefix_tile(128, 4) == 128
