"""The compiled attention: right to within its roundings, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.cpu.attention_stage import Case, Stage, Step, exact
from tests.support.kernels import MATRIX_UNITS

pytestmark = [pytest.mark.usefixtures("each_attention"), pytest.mark.single_kernels]

# Around the ends of groups of 16 keys and of blocks of 256.
EDGES = (1, 2, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257, 511, 513, 700)


def whole(case: Case) -> list[Step]:
    """Return every sequence in one piece, one after the other."""
    return [[(i, length)] for i, length in enumerate(case.lengths)]


def compute(case: Case, steps: Sequence[Step], **options: int) -> list[torch.Tensor]:
    stage = Stage(case, **options)
    try:
        return stage.run(steps)
    finally:
        stage.close()


def check_exact(case: Case, steps: Sequence[Step], **options: int) -> None:
    outs = compute(case, steps, **options)
    for i, (out, qkv) in enumerate(zip(outs, case.sequences(), strict=True)):
        expected, error = exact(case, qkv)
        worst = ((out.double() - expected).abs() / error).max().item()
        assert worst <= 1, f"sequence {i} of {len(qkv)} tokens"


SHAPES = [
    Case(lengths=EDGES),
    Case(lengths=(5, 300), norm=True),
    Case(lengths=(5, 300), rotate=False, norm=True, head_dim=128, kv_heads=2, group=4),
    Case(lengths=(33, 600), kv_heads=2, group=8, head_dim=128, page_size=64),
    Case(lengths=(33, 290), kv_heads=4, group=1, head_dim=96, page_size=4),
    Case(lengths=(33, 290), kv_heads=2, group=4, head_dim=32, page_size=1),
    Case(lengths=(20, 270), kv_heads=1, group=3, head_dim=256, page_size=32),
    Case(lengths=(20, 270), kv_heads=1, group=5, head_dim=160, page_size=6),
    Case(lengths=(20, 270), kv_heads=1, group=32, head_dim=64, page_size=7),
    Case(lengths=(20, 600), window=1),
    Case(lengths=(20, 600), window=100, page_size=4),
    Case(lengths=(20, 900), window=256),
    Case(lengths=(20, 900), window=300, kv_heads=1, group=8, head_dim=128),
    Case(lengths=(700,), spread=6.0),  # a few keys have all the weight
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_prompts_match_float64(case: Case) -> None:
    check_exact(case, whole(case))


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_prompts_and_single_tokens_in_one_step_match_float64(case: Case) -> None:
    steps: list[Step] = [[(i, 1)] for i, length in enumerate(case.lengths) if length > 1]
    steps += [[(i, length - 3) for i, length in enumerate(case.lengths) if length > 4]]
    steps += [[(i, 1) for i, length in enumerate(case.lengths) if length > 4]] * 2
    done = {i: sum(dict(rows).get(i, 0) for rows in steps) for i in range(len(case.lengths))}
    steps += [[(i, n - done[i]) for i, n in enumerate(case.lengths) if n > done[i]]] * 1
    check_exact(case, [rows for rows in steps if rows], threads=2)


def test_a_long_context_matches_float64() -> None:
    case = Case(lengths=(2000,))
    out = compute(case, [[(0, 1990)], *[[(0, 1)]] * 10], threads=2)[0]
    expected, error = exact(case, case.sequences()[0])
    assert ((out.double() - expected).abs() <= error).all()


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 4, 128), (2, 1, 32)])
def test_it_agrees_with_torch(kv_heads: int, group: int, head_dim: int, window: int | None) -> None:
    case = Case(
        lengths=(1, 40, 130, 300),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        window=window,
        norm=True,
    )
    steps: list[Step] = [[(1, 39), (2, 100)], [(0, 1), (1, 1), (2, 30), (3, 200)], [(3, 100)]]
    ours = compute(case, steps)
    theirs = Stage(case, compiled=False).run(steps)
    for a, b in zip(ours, theirs, strict=True):
        difference = (a.double() - b.double()).norm() / b.double().norm()
        assert difference < 0.01  # torch rounds the cosines and every product


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_threads_pages_and_pieces_change_no_bit(case: Case) -> None:
    expected = compute(case, whole(case))
    together: Step = [(i, length) for i, length in enumerate(case.lengths)]
    for threads in (1, 2, 3):
        assert_same(compute(case, [together], threads=threads, page_seed=threads), expected)
    for size in (1, 7, 64):
        assert_same(compute(case, chunks(case.lengths, size)), expected, case.lengths, size)


def chunks(lengths: Sequence[int], size: int) -> list[Step]:
    """Return steps of all sequences at once, so many tokens each; the last few of single tokens."""
    left = list(lengths)
    steps: list[Step] = []
    if size == 1:  # the whole way would take long
        steps.append([(i, n - 5) for i, n in enumerate(left) if n > 5])
        left = [min(n, 5) for n in left]
    while any(left):
        rows = [(i, min(n, size)) for i, n in enumerate(left) if n]
        left = [n - min(n, size) for n in left]
        steps.append(rows)
    return steps


def assert_same(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *context: object
) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), (i, *context)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(threads: int) -> None:
    """Also where a long row alone is spread over the threads, and in a batch isn't."""
    case = Case(lengths=(1900, *EDGES))
    filled: Step = [(i, length - 1) for i, length in enumerate(case.lengths) if length > 1]
    last: Step = [(i, 1) for i in range(len(case.lengths))]
    batch = Stage(case, threads=threads)
    batch.step(filled)
    together = batch.step(last)
    batch.close()
    alone = Stage(case, threads=threads, page_seed=5)
    alone.step(filled)
    for i in range(len(case.lengths)):
        one = alone.step([(i, 1)])[i]
        assert torch.equal(one.view(torch.int16), together[i].view(torch.int16)), i
    alone.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2]])
def test_one_plan_serves_many_layers(rows: list[int], threads: int) -> None:
    """Use one plan in several layers with their own caches; a long row is spread over threads."""
    case = Case(lengths=(1800, 300, 40))
    stage = Stage(case, threads=threads)
    stage.step([(i, case.lengths[i]) for i in rows])
    attention = stage.compiled
    attention.cache[0].copy_(attention.cache[1] * 2)
    for count in (1, 5):  # tokens of each row
        q = random_queries(case, count * len(rows))
        layout = stage.layout({i: case.lengths[i] for i in rows}, dict.fromkeys(rows, count))
        attention.begin(layout)
        alone = [attention.attend(layer, q, None) for layer in range(2)]
        assert not torch.equal(*alone)
        for layer in (0, 1):
            after_others = attention.attend_layers([0, 1, 1, 0, 1 - layer, layer], q, None)
            assert torch.equal(after_others, alone[layer])
    stage.close()


def random_queries(case: Case, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, case.heads, case.head_dim, generator=generator).bfloat16()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    """Lengths of some sequences, and steps that compute them in pieces of any size."""
    lengths = tuple(draw(st.lists(st.integers(1, 600), min_size=1, max_size=5)))
    left = list(lengths)
    steps: list[Step] = []
    while any(left):
        rows = []
        for i, n in enumerate(left):
            if n and draw(st.booleans()):
                count = draw(st.sampled_from([1, 2, 5, 16, 40, 300, n]))
                rows.append((i, min(count, n)))
        if not rows:
            first = next(i for i, n in enumerate(left) if n)
            rows = [(first, left[first])]
        for i, count in rows:
            left[i] -= count
        steps.append(rows)
        if len(steps) == 20:
            steps.append([(i, n) for i, n in enumerate(left) if n])
            left = [0] * len(left)
    return lengths, [rows for rows in steps if rows]


@settings(max_examples=40, deadline=None)
@given(
    schedule=schedules(),
    shape=st.sampled_from([(3, 3, 64), (1, 8, 32), (2, 1, 96), (1, 1, 256), (2, 4, 128)]),
    page_size=st.sampled_from([1, 4, 16, 64]),
    window=st.sampled_from([None, 3, 16, 130, 400]),
    threads=st.sampled_from([1, 2, 3]),
    norm=st.booleans(),
)
def test_any_schedule_gives_the_same_bits(
    schedule: tuple[tuple[int, ...], list[Step]],
    shape: tuple[int, int, int],
    page_size: int,
    window: int | None,
    threads: int,
    norm: bool,
) -> None:
    lengths, steps = schedule
    kv_heads, group, head_dim = shape
    case = Case(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        lengths=lengths,
        window=window,
        norm=norm,
    )
    assert_same(compute(case, steps, threads=threads), compute(case, whole(case)), lengths, steps)


def test_a_shared_prefix_is_read_from_another_rows_pages() -> None:
    case = Case(lengths=(200, 200))
    stage = Stage(case)
    shared = 160
    stage.sequences[1][:shared] = stage.sequences[0][:shared]
    own = Stage(case)
    own.sequences[1][:shared] = own.sequences[0][:shared]
    expected = own.run([[(0, 200)], [(1, 200)]])
    stage.step([(0, 200)])
    stage.pages[1][: shared // case.page_size] = stage.pages[0][: shared // case.page_size]
    stage.computed[1] = shared
    assert_same([stage.step([(1, 40)])[1]], [expected[1][shared:]])
    stage.close()
    own.close()


def test_a_token_may_be_written_again() -> None:
    """Check that the value of a later token, next to it in memory, stays."""
    case = Case(lengths=(40,))
    stage = Stage(case)
    expected = stage.step([(0, 40)])[0]
    for first in (38, 37, 36):
        stage.computed[0] = first
        stage.step([(0, 1)])
        stage.computed[0] = 39
        assert_same([stage.step([(0, 1)])[0]], [expected[39:]])
    stage.close()


def test_infinite_and_undefined_numbers_stay_in_their_row_and_head() -> None:
    case = Case(lengths=(50, 50))
    stage = Stage(case)
    expected = stage.run(whole(case))
    stage.close()
    stage = Stage(case)
    stage.sequences[0][20, case.heads + 1, 0] = torch.nan  # a key of the second key head
    stage.sequences[0][30, case.heads + case.kv_heads + 2, 5] = torch.inf  # a value of the third
    out = stage.run([[(0, 50), (1, 50)]])
    stage.close()
    assert_same(out[1:], expected[1:])
    second = slice(case.group, 2 * case.group)
    assert out[0][20:, second].isnan().all()
    assert out[0][:, : case.group].equal(expected[0][:, : case.group])
    assert out[0][:20, second].equal(expected[0][:20, second])
    third = slice(2 * case.group, None)
    assert (out[0][30:, third, 5] == torch.inf).all()


def test_equal_keys_give_the_mean_of_the_values() -> None:
    case = Case(lengths=(600,), rotate=False)
    stage = Stage(case)
    stage.sequences[0][:, : case.heads + case.kv_heads] = 0.0
    out = stage.run([[(0, 600)]])[0]
    stage.close()
    values = stage.sequences[0][:, case.heads + case.kv_heads :].double()
    means = values.cumsum(0) / torch.arange(1, 601)[:, None, None]
    expected = means.repeat_interleave(case.group, dim=1)
    assert torch.allclose(out.double(), expected, rtol=2**-8, atol=1e-6)
    assert np.isfinite(out.float().numpy()).all()


def test_a_matrix_unit_adds_up_values_in_its_own_order(each_attention: str) -> None:
    """The even and the odd ones of 16 keys are added up apart, and then both to the sum."""
    case = Case(lengths=(48,), rotate=False)
    stage = Stage(case)
    stage.sequences[0][:, : case.heads + case.kv_heads] = 0.0  # so all weights are 1
    values = stage.sequences[0][:, case.heads + case.kv_heads :]
    # The sum is 0 but for its roundings, and so shows their order.
    draw = np.random.default_rng(0)
    values[:24] *= torch.from_numpy(2.0 ** draw.integers(0, 20, values[:24].shape))
    values[24:] = -values[draw.permutation(24)]
    out = stage.run([[(0, 48)]])[0][-1]
    stage.close()
    total = torch.zeros(values[0].shape)
    for group in values.float().unflatten(0, (3, 16)):
        even, odd = (sum(group[first::2], torch.zeros_like(total)) for first in (0, 1))
        total = total + (even + odd)
    expected = (total * torch.tensor(1 / 48)).bfloat16().repeat_interleave(case.group, dim=0)
    assert torch.equal(out, expected) == (each_attention in MATRIX_UNITS)
