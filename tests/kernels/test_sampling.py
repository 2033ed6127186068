"""The sampler's kernels against the sampler on torch: the same logits, parameters and seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpu.kernels import KernelLoader
from gpu.sampling.sampler_io import SamplerRow
from tests.support.device_draws import (
    NEAR_TIE,
    adjusted,
    assert_same_tokens,
    assert_same_top,
    device_draw,
    exact_draw,
    reference_draw,
    row,
)
from trioserve.protocol.sampling import NAN_LOGITS, NO_TOKEN

pytestmark = pytest.mark.every_arithmetic

HISTORY = [3, 3, 5, 7, 1, 5, 5, 9, 5]
PROMPT = 4

ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "hottest": {"temperature": 100.0},
    "coldest": {"temperature": 1e-40},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 7},
    "top_k more than blocks": {"top_k": 90},
    "top_k all": {"top_k": 10**6},
    "top_p": {"top_p": 0.9},
    "top_p flat": {"top_p": 0.97, "temperature": 10.0},
    "top_p tiny": {"top_p": 1e-9},
    "top_p nearly 1": {"top_p": 1 - 1e-9},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 20, "top_p": 0.7},
    "large top_k and top_p": {"top_k": 250, "top_p": 0.9, "temperature": 8.0},
    "top_k, top_p and min_p": {"top_k": 40, "top_p": 0.95, "min_p": 0.1},
    "bias": {"logit_bias": {0: 3.0, 17: -100.0, 29: 100.0}},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.4},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": -2.0},
    "min_tokens": {"min_tokens": 6, "stop_ids": [2, 4, 29], "temperature": 0.0},
    "min_tokens reached": {"min_tokens": 5, "stop_ids": [2, 4, 29], "temperature": 0.0},
    "another sequence": {"sequence_index": 3},
    "largest seed": {"seed": 2**64 - 1},
}


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(0, scale, (rows, vocab_size)).astype(np.float32))


@pytest.mark.parametrize("vocab_size", [30, 300, 1000, 4101])
def test_each_parameter_alone_draws_the_reference_token(
    loader: KernelLoader, vocab_size: int
) -> None:
    rows = [
        row(HISTORY, PROMPT, **{"seed": seed, **fields})
        for fields in ALONE.values()
        for seed in (1, 2)
    ]
    logits = random_logits(len(rows), vocab_size, seed=vocab_size)
    drawn = device_draw(loader, logits, rows)
    assert_same_tokens(logits, rows, drawn.tokens, reference_draw(logits, rows).tokens)
    assert not drawn.marks.any()


def test_the_near_ties_that_excuse_another_token_are_rare() -> None:
    rows = [row(HISTORY, PROMPT, **{"seed": 1, **fields}) for fields in ALONE.values()]
    logits = random_logits(len(rows), 300, seed=300)
    exact = [exact_draw(logits[i].double().numpy(), each) for i, each in enumerate(rows)]
    near = [name for name, (_, margin) in zip(ALONE, exact, strict=True) if margin < NEAR_TIE]
    # Only where everything is kept does the last running sum meet top_p's share.
    assert set(near) <= {"top_p nearly 1", "min_p 1"}
    tokens = reference_draw(logits, rows).tokens.tolist()
    assert tokens == [token for token, _ in exact]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.5, 50.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 60, 299, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.85, 0.99]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-5, 0.02, 0.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.7, 1.9]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.1, -0.6]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.9, -1.4]),
        "min_tokens": st.integers(0, 6),
        "logit_bias": st.dictionaries(st.integers(0, 2), st.floats(-9, 9, width=32), max_size=2),
        "stop_ids": st.lists(st.integers(1, 2), max_size=2),
        "seed": st.integers(0, 2**64 - 1),
        "sequence_index": st.integers(0, 5),
        "logprobs": st.integers(-1, 8),
        "processed_logprobs": st.booleans(),
    }
)


@pytest.mark.parametrize("processed", [False, True])
@settings(
    max_examples=20,
    deadline=None,
    # A smaller example isn't worth the hundreds of launches that the search for it takes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_combination_draws_the_reference_token(
    loader: KernelLoader, processed: bool, data: st.DataObject
) -> None:
    vocab_size = data.draw(st.sampled_from([3, 127, 128, 129, 300, 1300]), label="vocab_size")
    rows = []
    for _ in range(data.draw(st.integers(1, 4), label="rows")):
        tokens = data.draw(st.lists(st.integers(0, 2), max_size=9))
        prompt = data.draw(st.integers(0, len(tokens)))
        rows.append(row(tokens, prompt, **data.draw(PARAMS)))
    logits = random_logits(len(rows), vocab_size, data.draw(st.integers(0, 99), label="logits"))
    if data.draw(st.booleans(), label="many ties"):
        logits = (logits / 4).round()
    drawn = device_draw(loader, logits, rows, processed=processed)
    wanted = reference_draw(logits, rows, processed=processed)
    assert_same_tokens(logits, rows, drawn.tokens, wanted.tokens)
    assert not drawn.marks.any()
    same = drawn.tokens == wanted.tokens.numpy()
    if wanted.logprobs is not None and wanted.top is not None:
        close = {"rtol": 2e-5, "atol": 2e-5}
        np.testing.assert_allclose(drawn.logprobs[same], wanted.logprobs.numpy()[same], **close)
        kept = [i for i in range(len(rows)) if not _cut_is_close(logits, rows[i], processed)]
        assert_same_top([drawn.top[i] for i in kept], [wanted.top[i] for i in kept])


def _cut_is_close(logits: torch.Tensor, each: SamplerRow, processed: bool) -> bool:
    """Return whether rounding may decide how many tokens are kept."""
    processed = processed or each.params.processed_logprobs
    return processed and (each.params.top_p < 1 or each.params.min_p > 0)


def test_a_real_vocabulary(loader: KernelLoader) -> None:
    """Rows of 128,256: candidates from the blocks' maxima, and those that don't fit the list."""
    peaked = random_logits(1, 128256, seed=1)
    flat = random_logits(1, 128256, seed=2, scale=0.3)
    cases: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (peaked, {"logprobs": 5}),
        (peaked, {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
        (peaked, {"top_p": 0.9}),
        (flat, {"top_p": 0.9}),
        (flat, {"top_k": 20000}),
    ]
    rows = [row(HISTORY, PROMPT, seed=9, **fields) for _, fields in cases]
    logits = torch.cat([each for each, _ in cases])
    drawn = device_draw(loader, logits, rows)
    wanted = reference_draw(logits, rows)
    assert_same_tokens(logits, rows, drawn.tokens, wanted.tokens)
    assert wanted.top is not None
    assert_same_top(drawn.top, wanted.top)


KEPT: dict[str, tuple[dict[str, Any], float]] = {
    # Parameters of 4,101 equal logits, and how many tokens they keep.
    "all": ({}, 4101),
    "top_k keeps ties": ({"top_k": 5}, 4101),
    "top_p cuts ties by id": ({"top_p": 0.5}, 2051),
    "top_p keeps one": ({"top_p": 1e-4}, 1),
    "top_k then top_p": ({"top_k": 5, "top_p": 0.25}, 1026),
    "min_p": ({"min_p": 1.0}, 4101),
}


@pytest.mark.parametrize("name", KEPT)
def test_equal_logits(loader: KernelLoader, name: str) -> None:
    fields, kept = KEPT[name]
    rows = [row(seed=seed, logprobs=3, **fields) for seed in range(3)]
    logits = torch.full((3, 4101), -4.25)
    drawn = device_draw(loader, logits, rows, processed=True)
    np.testing.assert_array_equal(drawn.tokens, reference_draw(logits, rows).tokens)
    np.testing.assert_allclose(drawn.logprobs, -math.log(kept), atol=1e-5)
    for ids, _ in drawn.top:
        assert ids.tolist() == list(range(min(3, int(kept))))


def test_ties_at_the_cut(loader: KernelLoader) -> None:
    """Cut within 2,000 equal logits, after two large ones: top_p keeps the first by id."""
    logits = torch.full((2, 4101), -20.0)
    logits[:, 100:4000:2] = 1.0
    logits[:, [50, 3000]] = 2.0
    weights = 2 * math.e + 1949
    rows = [
        row(seed=1, logprobs=8, top_p=(2 * math.e + 1500.5) / weights),
        row(seed=1, logprobs=8, top_k=3),
    ]
    drawn = device_draw(loader, logits, rows, processed=True)
    for i, total in enumerate((2 * math.e + 1501, 2 * math.e + 1949)):
        size = 1 if logits[i, drawn.tokens[i]] == 2 else 0
        assert drawn.logprobs[i] == pytest.approx(size - math.log(total), abs=1e-4)
        assert drawn.top[i][0].tolist() == [50, 3000, 100, 102, 104, 106, 108, 110]


def test_top_p_where_one_block_holds_it(loader: KernelLoader) -> None:
    """Many tokens of one block come after the largest of 30 others."""
    weights = torch.full((1, 4101), 1e-12)
    weights[0, 1:128] = 0.5
    weights[0, 0] = 1.0
    weights[0, 130:4000:129] = 0.9
    ahead = 1 + 0.9 * len(range(130, 4000, 129))
    rows = [
        row(seed=seed, top_p=(ahead + 27.25) / (ahead + 63.5), logprobs=0) for seed in (1, 2, 3)
    ]
    logits = weights.log().repeat(3, 1)
    drawn = device_draw(loader, logits, rows, processed=True)
    chosen = weights[0, drawn.tokens.astype(np.int64)].numpy() / (ahead + 27.5)
    np.testing.assert_allclose(drawn.logprobs, np.log(chosen), atol=1e-5)
    np.testing.assert_array_equal(drawn.tokens, reference_draw(logits, rows).tokens)


def test_the_first_largest_logit_is_the_greedy_token(loader: KernelLoader) -> None:
    logits = random_logits(4, 1000, seed=5)
    logits[0, [130, 700]] = 50.0
    logits[1, [999, 998]] = math.inf
    logits[2] = -0.0
    logits[2, 500] = 0.0
    logits[3] = -math.inf
    logits[3, 997] = -1e30
    drawn = device_draw(loader, logits, [row(temperature=0.0)] * 4)
    assert drawn.tokens.tolist() == [130, 998, 0, 997]


def test_stop_ids_are_masked_until_min_tokens_are_there(loader: KernelLoader) -> None:
    logits = random_logits(3, 300, seed=6)
    logits[:, 29], logits[:, 200] = 50.0, 40.0
    prompt = [3, 3, 5]
    rows = [
        row([*prompt, *range(output)], 3, temperature=0.0, min_tokens=5, stop_ids=[2, 29])
        for output in (4, 5, 6)
    ]
    drawn = device_draw(loader, logits, rows)
    assert drawn.tokens.tolist() == [200, 29, 29]


def test_infinite_logits_share_all_probability(loader: KernelLoader) -> None:
    logits = random_logits(30, 300, seed=5)
    logits[:, [7, 200, 299]] = math.inf
    rows = [row(seed=seed, logprobs=5, top_p=0.9) for seed in range(30)]
    drawn = device_draw(loader, logits, rows, processed=True)
    np.testing.assert_array_equal(drawn.tokens, reference_draw(logits, rows).tokens)
    assert set(drawn.tokens) == {7, 200, 299}
    np.testing.assert_allclose(drawn.logprobs, -math.log(3), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_leave_no_token(loader: KernelLoader, temperature: float) -> None:
    logits = random_logits(4, 300, seed=1)
    logits[0, 299] = math.nan
    logits[1] = -math.inf
    logits[3] = -math.inf
    logits[3, 8] = 0.0
    fields = {"temperature": temperature, "logprobs": 2, "top_k": 5}
    stop = {"min_tokens": 9, "stop_ids": [8]}
    rows = [row(**fields)] * 3 + [row(**fields, **stop)]
    drawn = device_draw(loader, logits, rows)
    assert drawn.tokens.tolist()[:2] == [NAN_LOGITS, NO_TOKEN]
    assert drawn.tokens[2] >= 0
    assert drawn.tokens[3] == NO_TOKEN
    assert np.isnan(drawn.logprobs[[0, 1, 3]]).all()
    assert [len(ids) for ids, _ in drawn.top] == [0, 0, 2, 0]
    # Nothing is appended for a row without a token.
    assert drawn.history[:, 0].tolist() == [-7, -7, drawn.tokens[2], -7]
    assert not drawn.marks.any()


@pytest.mark.parametrize("processed", [False, True])
def test_counts_of_prompt_and_output(loader: KernelLoader, processed: bool) -> None:
    """Tokens that occur dozens of times, some outside of the vocabulary, biased and masked too."""
    generator = np.random.default_rng(1)
    tokens = np.concatenate([generator.integers(0, 12, 700), [300, 2**31 - 1, -1, 299]])
    generator.shuffle(tokens)
    fields: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.01,
        "presence_penalty": 0.4,
        "logit_bias": {0: 1.0, 5: -2.0, 150: 3.0},
        "min_tokens": 10**6,
        "stop_ids": [5, 11, 200],
        "temperature": 0.0,
        "logprobs": 8,
    }
    rows, known = [], []
    for i in range(8):
        seen, prompt = tokens[: 100 * i], 40 * i
        rows.append(row(seen, prompt, **fields))
        # The sampler on torch knows no negative ids.
        prompt -= int((seen[:prompt] < 0).sum())
        known.append(row(seen[seen >= 0], prompt, **fields))
    logits = random_logits(8, 300, seed=2)
    drawn = device_draw(loader, logits, rows, processed=processed)
    wanted = reference_draw(logits, known, processed=processed)
    np.testing.assert_array_equal(drawn.tokens, wanted.tokens)
    assert wanted.logprobs is not None
    assert wanted.top is not None
    np.testing.assert_allclose(drawn.logprobs, wanted.logprobs, atol=1e-5)
    assert_same_top(drawn.top, wanted.top)
    assert not drawn.marks.any()


DISTRIBUTIONS: dict[str, tuple[dict[str, Any], list[float]]] = {
    # Parameters over the probabilities 0.4, 0.3, 0.2, 0.1, and what is drawn from.
    "plain": ({}, [0.4, 0.3, 0.2, 0.1]),
    "temperature": ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    "top_k": ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    "top_p": ({"top_p": 0.85}, [4 / 9, 3 / 9, 2 / 9, 0]),
    "min_p": ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
    "bias": ({"logit_bias": {3: math.log(7)}}, [0.4 / 1.6, 0.3 / 1.6, 0.2 / 1.6, 0.7 / 1.6]),
    "presence": ({"presence_penalty": math.log(2)}, [0.2 / 0.8, 0.3 / 0.8, 0.2 / 0.8, 0.1 / 0.8]),
}


def test_draws_follow_the_distribution(loader: KernelLoader) -> None:
    """Chi-square of 120 draws each; the tokens are in three blocks of the vocabulary."""
    draws, places = 120, [0, 127, 128, 299]
    logits = torch.full((300,), -math.inf)
    logits[places] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    rows = []
    for fields, _ in DISTRIBUTIONS.values():
        moved = {places[token]: bias for token, bias in fields.get("logit_bias", {}).items()}
        fields = {**fields, "logit_bias": moved}
        rows += [row([5, 0], 1, seed=1000 + seed, **fields) for seed in range(draws)]
    tokens = device_draw(loader, logits.repeat(len(rows), 1), rows).tokens.reshape(-1, draws)
    for of_one, (name, (_, probabilities)) in zip(tokens, DISTRIBUTIONS.items(), strict=True):
        counts = np.array([(of_one == place).sum() for place in places])
        assert counts.sum() == draws, name
        expected = draws * np.array(probabilities)
        assert (counts[expected == 0] == 0).all(), name
        likely = expected > 0
        statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
        # The 0.999 quantiles of chi-square with 1 to 3 degrees of freedom.
        assert statistic < [10.83, 13.82, 16.27][likely.sum() - 2], (name, counts, expected)


MIXED = [
    row(HISTORY, PROMPT, seed=3, logprobs=4, **ALONE[name])
    for name in ("plain", "greedy", "top_k", "top_p flat", "min_p", "repetition", "frequency")
]


def same_bits(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.tobytes() == right.tobytes()


def test_results_do_not_depend_on_the_order_of_threads(loaders: list[KernelLoader]) -> None:
    logits = random_logits(len(MIXED), 1300, seed=8)
    first, *others = [device_draw(each, logits, MIXED) for each in loaders]
    for other in others:
        assert same_bits(first.tokens, other.tokens)
        assert same_bits(first.logprobs, other.logprobs)
        for (ids, values), (other_ids, other_values) in zip(first.top, other.top, strict=True):
            assert same_bits(ids, other_ids)
            assert same_bits(values, other_values)


def test_a_row_does_not_depend_on_its_batch(loader: KernelLoader) -> None:
    logits = random_logits(len(MIXED), 1300, seed=8)
    together = device_draw(loader, logits, MIXED)
    for i in range(len(MIXED)):
        alone = device_draw(loader, logits[i : i + 1], MIXED[i : i + 1])
        assert same_bits(alone.tokens[0], together.tokens[i])
        assert same_bits(alone.logprobs[0], together.logprobs[i])
        assert same_bits(alone.top[0][0], together.top[i][0])
        assert same_bits(alone.top[0][1], together.top[i][1])


def test_rows_of_padding_are_left_alone(loader: KernelLoader) -> None:
    logits = random_logits(4, 300, seed=3)
    logits[[1, 3]] = math.nan
    rows = [row(seed=1), None, row(seed=2, logprobs=2), None]
    drawn = device_draw(loader, logits, rows)
    real = [each for each in rows if each]
    wanted = reference_draw(logits[[0, 2]], real).tokens.tolist()
    assert drawn.tokens.tolist() == [wanted[0], -9, wanted[1], -9]


def test_a_bias_and_a_bitmask_come_after_the_masked_stop_ids(loader: KernelLoader) -> None:
    logits = random_logits(6, 301, seed=4)
    generator = np.random.default_rng(4)
    bias = torch.from_numpy(generator.normal(0, 2, (6, 301)).astype(np.float32))
    allowed = torch.from_numpy(generator.random((6, 301)) < 0.3)
    allowed[5] = False
    padded = torch.nn.functional.pad(allowed, (0, 19)).view(6, 10, 32).long()
    words = (padded << torch.arange(32)).sum(dim=2)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).int()
    fields: dict[str, Any] = {"seed": 5, "repetition_penalty": 1.5, "logprobs": 4}
    rows = [row(HISTORY, PROMPT, **fields, **ALONE["top_k"] | {"top_k": k}) for k in (0, 3, 50)]
    rows += [row(HISTORY, PROMPT, **fields, temperature=0.0), row(), row()]
    drawn = device_draw(loader, logits, rows, bias=bias, bitmask=bitmask)
    steps_2_to_4 = [adjusted(each.double().numpy(), rows[i]) for i, each in enumerate(logits)]
    moved = torch.from_numpy(np.stack(steps_2_to_4)).float() + bias
    moved[~allowed] = -math.inf
    plain = [row(each.tokens, seed=each.params.seed, top_k=each.params.top_k,
                 temperature=each.params.temperature) for each in rows[:5]]  # fmt: skip
    wanted = reference_draw(moved[:5], plain).tokens.tolist()
    assert drawn.tokens.tolist() == [*wanted, -1]
    # What is reported is the model's own distribution.
    raw = reference_draw(logits[:5], rows[:5]).top
    assert raw is not None
    assert_same_top(drawn.top[:5], raw)
