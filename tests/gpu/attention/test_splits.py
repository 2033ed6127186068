"""Rows cut into work items: every position once, dense partial results, within the bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu.attention.splits import MIN_SPLIT, TILE, Splits, max_items, split

LENGTHS = st.lists(st.integers(0, 5000) | st.integers(0, 70), min_size=1, max_size=40)
TARGETS = st.integers(1, 400)
WINDOWS = st.none() | st.integers(1, 600)


def check(
    splits: Splits, lengths: Sequence[int], begins: Sequence[int], reserved: Sequence[int]
) -> None:
    """Items cover begins .. lengths of each row once, and their partials follow those reserved."""
    items, start = splits.items, splits.partial_start
    assert items.dtype == start.dtype == np.int32
    assert items.flags.c_contiguous
    assert start[0] == 0
    assert splits.num_partials == start[-1]
    sizes = items[:, 2] - items[:, 1]
    assert (sizes > 0).all()
    assert (np.diff(sizes) <= 0).all()
    for row, (begin, end) in enumerate(zip(begins, lengths, strict=True)):
        own = items[items[:, 0] == row]
        own = own[own[:, 1].argsort()]
        if begin >= end:
            assert len(own) == 0
            assert start[row + 1] - start[row] == reserved[row]
            continue
        assert own[0, 1] == begin
        assert own[-1, 2] == end
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert (own[1:, 1] % TILE == 0).all()
        if len(own) == 1 and not reserved[row]:
            assert own[0, 3] == -1
            assert start[row + 1] == start[row]
        else:
            first = start[row] + reserved[row]
            assert own[:, 3].tolist() == list(range(first, start[row + 1]))
            assert len(own) == start[row + 1] - first


@given(lengths=LENGTHS, target=TARGETS, window=WINDOWS)
def test_balanced(lengths: list[int], target: int, window: int | None) -> None:
    splits = split(lengths, target_items=target, window=window)
    begins = [max(0, length - window) if window else 0 for length in lengths]
    check(splits, lengths, begins, [0] * len(lengths))
    assert splits.num_partials <= len(splits.items) <= max_items(len(lengths), target)
    # Rows may be fewer than the bucket that a graph was captured for.
    assert len(splits.items) <= max_items(len(lengths) + 5, target)
    for row in np.flatnonzero(np.bincount(splits.items[:, 0], minlength=1) > 1):
        own = splits.items[splits.items[:, 0] == row]
        sizes = np.sort(own[:, 2] - own[:, 1])
        assert sizes[-1] >= MIN_SPLIT


@given(lengths=LENGTHS, fixed=st.integers(1, 32).map(lambda n: n * TILE), window=WINDOWS)
def test_fixed(lengths: list[int], fixed: int, window: int | None) -> None:
    splits = split(lengths, target_items=7, window=window, fixed_split=fixed)
    begins = [max(0, length - window) if window else 0 for length in lengths]
    check(splits, lengths, begins, [0] * len(lengths))
    bound = max_items(len(lengths), 7, fixed_split=fixed, max_context=max(lengths))
    assert splits.num_partials <= len(splits.items) <= bound
    # A row is cut in the same places by itself.
    for row, length in enumerate(lengths):
        alone = split([length], target_items=50, window=window, fixed_split=fixed)
        together = splits.items[splits.items[:, 0] == row]
        assert sorted(alone.items[:, 1:3].tolist()) == sorted(together[:, 1:3].tolist())
        assert len(alone.items) == len(together)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 1000), st.integers(0, 3)), min_size=1
    ),
    target=TARGETS,
    window=WINDOWS,
    fixed=st.none() | st.just(128),
)
def test_prefixes_keep_their_partials(
    rows: list[tuple[int, int, int]], target: int, window: int | None, fixed: int | None
) -> None:
    begins = [begin for begin, _, _ in rows]
    lengths = [length for _, length, _ in rows]
    reserved = [count if length else 0 for _, length, count in rows]
    splits = split(
        lengths,
        target_items=target,
        window=window,
        begin=begins,
        reserved=reserved,
        fixed_split=fixed,
    )
    seen = [
        max(begin, length - window if window else 0)
        for begin, length in zip(begins, lengths, strict=True)
    ]
    check(splits, lengths, seen, reserved)
    bound = max_items(len(rows), target, fixed_split=fixed, max_context=1000)
    assert splits.num_partials <= bound + sum(reserved)


def test_a_long_row_fills_the_gpu() -> None:
    items = split([100_000], target_items=49).items
    sizes = items[:, 2] - items[:, 1]
    assert 45 <= len(items) <= 49
    assert sizes.max() <= 1.1 * 100_000 / 49


def test_few_rows_fill_the_gpu_evenly() -> None:
    items = split([1024] * 8, target_items=49).items
    assert len(items) == 48
    assert (items[:, 2] - items[:, 1]).max() == 176


def test_many_rows_stay_whole_but_for_the_longest() -> None:
    splits = split([40_000] + [1000] * 63, target_items=49)
    rows = splits.items[:, 0]
    assert (np.bincount(rows)[1:] == 1).all()
    assert (splits.items[:, 2] - splits.items[:, 1]).max() <= 103_000 / 24
    assert (splits.items[rows > 0, 3] == -1).all()


def test_a_short_row_is_not_cut() -> None:
    assert split([127], target_items=49).items.tolist() == [[0, 0, 127, -1]]
    assert len(split([128], target_items=49).items) == 2
