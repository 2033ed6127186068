"""Rows that begin with the same pages are computed together, and have the bits they have alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.cpu.attention_stage import Case, Stage, exact
from tests.support.kernels import MATRIX_UNITS

pytestmark = [pytest.mark.usefixtures("each_attention"), pytest.mark.single_kernels]

Prefix = tuple[int, int]
"""Another sequence's number, and how many tokens of it a sequence begins with."""


def stage_of(case: Case, prefixes: Sequence[Prefix | None], threads: int = 1) -> Stage:
    """Return all sequences without their last tokens, which are in pages of their own."""
    stage = Stage(case, threads=threads)
    for i, prefix in enumerate(prefixes):
        if prefix is not None:
            other, tokens = prefix
            pages = min(tokens, case.lengths[i] - 1, case.lengths[other] - 1) // case.page_size
            tokens = pages * case.page_size
            stage.sequences[i][:tokens] = stage.sequences[other][:tokens]
            stage.pages[i][:pages] = stage.pages[other][:pages]
            stage.computed[i] = tokens
        if stage.computed[i] < case.lengths[i] - 1:
            stage.step([(i, case.lengths[i] - 1 - stage.computed[i])])
        stage.computed[i] = case.lengths[i] - 1
    return stage


def tiles_of(stage: Stage) -> list[tuple[list[int], int]]:
    """Sequences that compute their last tokens together, and how many keys they share."""
    case = stage.case
    ends = dict(enumerate(case.lengths))
    layout = stage.layout(ends, dict.fromkeys(ends, 1))
    stage.compiled.begin(layout)
    tiles = stage.compiled.tiles(case.window)
    return [(sorted(int(layout.slots[row]) for row in rows), shared) for rows, shared in tiles]


def check(case: Case, prefixes: Sequence[Prefix | None], threads: int = 1) -> None:
    """Assert that last tokens computed in one step are right and have the bits of each alone."""
    stage = stage_of(case, prefixes, threads)
    numbers = range(len(case.lengths))
    together = stage.step([(i, 1) for i in numbers])
    for i, length in enumerate(case.lengths):
        stage.computed[i] = length - 1
        alone = stage.step([(i, 1)])[i]
        assert torch.equal(together[i].view(torch.int16), alone.view(torch.int16)), i
        expected, error = exact(case, stage.sequences[i], length - 1)
        assert ((together[i].double() - expected).abs() <= error).all(), i
    stage.close()


def of_one(count: int, tokens: int) -> list[Prefix | None]:
    return [None, *[(0, tokens)] * (count - 1)]


LENGTHS = (1020, 1021, 1100, 993, 1023, 1024, 1025, 1300, 1279, 1281, 1040, 1000)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("rows", [2, 3, 4, 7, 8, 9, 12])
def test_rows_of_one_prefix(rows: int, page_size: int, threads: int) -> None:
    check(Case(lengths=LENGTHS[:rows], page_size=page_size), of_one(rows, 992), threads)


@pytest.mark.parametrize("shared", [16, 240, 256, 272, 511, 512, 513])
@pytest.mark.parametrize("threads", [1, 2])
def test_prefixes_that_end_about_a_block(shared: int, threads: int) -> None:
    check(Case(lengths=(600, 513, 700, 1100)), of_one(4, shared), threads)


@pytest.mark.parametrize("window", [1, 40, 100, 256, 300, 600, 1000, 2000])
@pytest.mark.parametrize("threads", [1, 2])
def test_windows(window: int, threads: int) -> None:
    case = Case(lengths=(900, 905, 950, 1100, 1500), window=window)
    check(case, of_one(5, 880), threads)


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(600,) * 4, kv_heads=2, group=8, head_dim=128),
        Case(lengths=(600,) * 5, kv_heads=4, group=1, head_dim=96, norm=True),
        Case(lengths=(600,) * 40, kv_heads=1, group=1, head_dim=32),
        Case(lengths=(600,) * 4, kv_heads=1, group=40),  # a token fills more than a tile
        Case(lengths=(600,) * 4, kv_heads=1, group=5, head_dim=160, page_size=48),
        Case(lengths=(600,) * 4, page_size=4),  # pages without whole groups of keys
        Case(lengths=(600,) * 4, page_size=7),
        Case(lengths=(600,) * 4, spread=6.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_shapes(case: Case, threads: int) -> None:
    check(case, of_one(len(case.lengths), 512), threads)


def test_what_is_computed_together() -> None:
    lengths = (600, 610, 620, 630, 640, 650, 700)
    prefixes = [None, (0, 512), (0, 512), None, (3, 400), (0, 64), (6, 0)]
    stage = stage_of(Case(lengths=lengths), prefixes)
    tiles = tiles_of(stage)
    stage.close()
    # What sequence 5 shares with the first three is less than what these would lose.
    assert sorted(rows for rows, _ in tiles) == [[0, 1, 2], [3, 4], [5], [6]]
    assert {tuple(rows): shared for rows, shared in tiles}[0, 1, 2] == 512
    assert {tuple(rows): shared for rows, shared in tiles}[3, 4] == 400


def test_pages_that_agree_after_others_dont_are_not_shared() -> None:
    case = Case(lengths=(600, 600))
    stage = stage_of(case, of_one(2, 512))
    stage.pages[1][0] = stage.pages[0][-1]
    assert sorted(rows for rows, _ in tiles_of(stage)) == [[0], [1]]
    stage.close()


def test_rows_beyond_the_room_of_a_tile_make_another(each_attention: str) -> None:
    stage = stage_of(Case(lengths=LENGTHS), of_one(12, 992))
    room = 10 if each_attention in MATRIX_UNITS else 8
    assert sorted(len(rows) for rows, _ in tiles_of(stage)) == [12 - room, room]
    stage.close()


def test_a_window_that_begins_behind_the_prefix_shares_nothing() -> None:
    for window, expected in ((380, [[0], [1]]), (400, [[0, 1]]), (900, [[0, 1]])):
        stage = stage_of(Case(lengths=(600, 900), window=window), of_one(2, 512))
        assert sorted(rows for rows, _ in tiles_of(stage)) == expected, window
        stage.close()


def test_without_room_for_parts() -> None:
    """So many threads, blocks and heads that only some of the tiles can be split."""
    case = Case(lengths=(2000,) * 48, kv_heads=2, group=12, head_dim=32)
    check(case, of_one(48, 1900), threads=8)


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Prefix | None]]:
    """Lengths of some sequences, each of which begins with tokens of an earlier one, or doesn't."""
    lengths = tuple(draw(st.lists(st.integers(1, 900), min_size=2, max_size=10)))
    tokens = st.one_of(st.integers(0, 900), st.sampled_from([256, 512, 900]))
    prefixes = [
        (draw(st.integers(0, i - 1)), draw(tokens)) if i and draw(st.integers(0, 3)) else None
        for i in range(len(lengths))
    ]
    return lengths, prefixes


SHAPES = st.sampled_from([(3, 3, 64), (1, 8, 32), (2, 1, 96), (2, 4, 128)])
WINDOWS = st.sampled_from([None, 3, 130, 400])


@settings(max_examples=30, deadline=None)
@given(
    tree=trees(),
    shape=SHAPES,
    page_size=st.sampled_from([4, 16, 32, 64]),
    window=WINDOWS,
    threads=st.sampled_from([1, 2, 3]),
)
def test_any_tree_of_prefixes_gives_the_same_bits(
    tree: tuple[tuple[int, ...], list[Prefix | None]],
    shape: tuple[int, int, int],
    page_size: int,
    window: int | None,
    threads: int,
) -> None:
    lengths, prefixes = tree
    kv_heads, group, head_dim = shape
    case = Case(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        lengths=lengths,
        window=window,
    )
    check(case, prefixes, threads)


@settings(max_examples=50, deadline=None)
@given(tree=trees(), page_size=st.sampled_from([16, 32]), window=WINDOWS)
def test_tiles_have_every_row_once_and_share_what_agrees(
    tree: tuple[tuple[int, ...], list[Prefix | None]], page_size: int, window: int | None
) -> None:
    lengths, prefixes = tree
    case = Case(kv_heads=1, head_dim=32, page_size=page_size, lengths=lengths, window=window)
    stage = stage_of(case, prefixes)
    tiles = tiles_of(stage)
    stage.close()
    assert sorted(i for rows, _ in tiles for i in rows) == list(range(len(lengths)))
    for rows, shared in tiles:
        assert len(rows) <= 8
        if len(rows) == 1:
            continue
        assert shared > 0
        assert shared % page_size == 0
        assert shared <= min(lengths[i] for i in rows)
        assert shared > max(lengths[i] for i in rows) - (window or max(lengths))  # all see some
        pages = np.stack([stage.pages[i][: shared // page_size] for i in rows])
        assert (pages == pages[0]).all()
