"""The samplers against a slow float64 reference, exact probabilities and transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from gpu.cpu.sampling import CompiledSampler
from gpu.sampling.adjustments import Adjustment
from gpu.sampling.sampler import Sampled, Sampler
from gpu.sampling.sampler_io import SamplerRow
from trioserve.protocol.sampling import NAN_LOGITS, NO_TOKEN, SamplerParams
from trioserve.protocol.wire import ints

Floats = npt.NDArray[np.float64]
PROMPT = [3, 3, 5, 7]
OUTPUT = [1, 5, 5, 9, 5]

which: str = "torch"
"""The sampler that the tests are run with at the moment."""


@pytest.fixture(scope="module", params=["torch", "compiled"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[None]:
    global which
    if request.param == "compiled":
        try:
            load_library()
        except LibraryBuildError as error:
            pytest.skip(str(error))
    which = request.param
    yield
    which = "torch"


class AsTorchs(Sampler):
    """The compiled sampler, which takes and gives NumPy's arrays, in the shape of torch's."""

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplerRow],
        adjustment: Adjustment | None = None,
    ) -> Sampled:
        sampler = CompiledSampler(
            load_library(), self.vocab_size, 2, processed_logprobs=self.processed_logprobs
        )
        drawn = sampler.sample(logits.float().contiguous().numpy(), rows, adjustment)
        logprobs = None if drawn.logprobs is None else torch.from_numpy(drawn.logprobs)
        return Sampled(torch.from_numpy(drawn.tokens).long(), logprobs, drawn.top)


def make_sampler(vocab_size: int, *, processed_logprobs: bool = False) -> Sampler:
    kind = Sampler if which == "torch" else AsTorchs
    return kind(vocab_size, "cpu", processed_logprobs=processed_logprobs)


def adjusted(logits: Floats, params: SamplerParams, tokens: Sequence[int], prompt: int) -> Floats:
    """Steps 2 to 4 of trioserve.protocol.sampling, one token at a time."""
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    output = list(tokens[prompt:])
    for token in set(tokens):
        penalty = params.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in ints(params.stop_ids):
            x[token] = -np.inf
    return x


def reference(
    logits: Floats, params: SamplerParams, tokens: Sequence[int] = (), prompt: int = 0
) -> Floats:
    """Return the exact distribution that the next token is to be drawn from."""
    x = adjusted(logits, params, tokens, prompt)
    keep = np.ones(len(x), dtype=bool)
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    x = x / params.temperature
    if 0 < params.top_k < len(x):
        keep = x >= np.sort(x)[-params.top_k]
    probabilities = np.where(keep, np.exp(x - x.max()), 0.0)
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        reached = np.cumsum(probabilities[order]) >= params.top_p
        dropped = order[int(np.argmax(reached)) + 1 :]
        probabilities[dropped] = 0.0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    result: Floats = probabilities / probabilities.sum()
    return result


def draw(
    logits: Floats, params: SamplerParams, count: int, tokens: Sequence[int] = (), prompt: int = 0
) -> npt.NDArray[np.int64]:
    """``count`` draws with the seeds 0, 1, …, all in one batch."""
    sampler = make_sampler(len(logits))
    fields = {name: getattr(params, name) for name in SamplerParams.__slots__ if name[0] != "_"}
    rows = [
        SamplerRow(SamplerParams(**{**fields, "seed": seed}), tokens, prompt)
        for seed in range(count)
    ]
    batch = torch.tensor(logits, dtype=torch.float32).repeat(count, 1)
    result: npt.NDArray[np.int64] = sampler.sample(batch, rows).tokens.numpy()
    return result


def distribution(
    logits: Floats, params: SamplerParams, tokens: Sequence[int] = (), prompt: int = 0
) -> Floats:
    """Return the distribution that the sampler says it drew from."""
    fields = {name: getattr(params, name) for name in SamplerParams.__slots__ if name[0] != "_"}
    params = SamplerParams(**{**fields, "logprobs": len(logits)})
    sampler = make_sampler(len(logits), processed_logprobs=True)
    batch = torch.tensor(logits, dtype=torch.float32)[None]
    sampled = sampler.sample(batch, [SamplerRow(params, tokens, prompt)])
    assert sampled.top is not None
    ids, logprobs = sampled.top[0]
    result = np.zeros(len(logits))
    result[ids] = np.exp(logprobs.astype(np.float64))
    return result


def critical_value(freedom: int) -> float:
    """Return the 1e-4 point of chi-square, by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_drawn_from(drawn: npt.NDArray[np.int64], probabilities: Floats) -> None:
    """Assert that counts pass a chi-square test at level 1e-4, with no token of probability 0."""
    observed = np.bincount(drawn, minlength=len(probabilities))
    assert observed[probabilities == 0].sum() == 0
    expected = probabilities * len(drawn)
    # Cells with few expected draws are taken together, as the test's approximation asks.
    rare = expected < 8
    cells = [(observed[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() >= 8:
        cells.append((observed[rare].sum(), expected[rare].sum()))
    assert len(cells) > 1, "a test of one cell shows nothing"
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    assert statistic < critical_value(len(cells) - 1)


def some_logits(vocab_size: int = 24, seed: int = 0, spread: float = 1.5) -> Floats:
    return np.random.default_rng(seed).normal(size=vocab_size) * spread


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature below 1": {"temperature": 0.4},
    "temperature above 1": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 1.2},
    "negative penalties": {"frequency_penalty": -0.4, "presence_penalty": -0.5},
    "min_tokens": {"min_tokens": 6, "stop_ids": [0, 8]},
    "min_tokens reached": {"min_tokens": 5, "stop_ids": [0, 8]},
    "logit_bias": {"logit_bias": {0: 2.0, 4: -100.0, 11: 1.0}},
    "all but one": {
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "min_tokens": 20,
        "stop_ids": [2, 6],
        "logit_bias": {5: 3.0, 1: 1.0},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    logits, params, tokens = some_logits(), SamplerParams(**CASES[name]), PROMPT + OUTPUT
    exact = reference(logits, params, tokens, len(PROMPT))
    drawn = draw(logits, params, 4000, tokens, len(PROMPT))
    assert_drawn_from(drawn, exact)
    assert np.allclose(distribution(logits, params, tokens, len(PROMPT)), exact, atol=1e-6)


def test_chi_square_notices_a_wrong_temperature() -> None:
    logits = some_logits()
    drawn = draw(logits, SamplerParams(temperature=1.3), 4000)
    with pytest.raises(AssertionError):
        assert_drawn_from(drawn, reference(logits, SamplerParams()))


def test_draws_over_several_blocks_follow_the_exact_distribution() -> None:
    logits = some_logits(vocab_size=300)
    assert_drawn_from(draw(logits, SamplerParams(), 4000), reference(logits, SamplerParams()))


def test_positions_and_sequence_indices_give_independent_draws() -> None:
    logits = some_logits(vocab_size=12, spread=1.0)
    exact = reference(logits, SamplerParams())
    batch = torch.tensor(logits, dtype=torch.float32).repeat(4000, 1)
    sampler = make_sampler(12)
    by_position = [SamplerRow(SamplerParams(seed=7), range(i), 0) for i in range(4000)]
    by_index = [SamplerRow(SamplerParams(seed=7, sequence_index=i), [], 0) for i in range(4000)]
    first = sampler.sample(batch.clone(), by_position).tokens.numpy()
    second = sampler.sample(batch.clone(), by_index).tokens.numpy()
    assert_drawn_from(first, exact)
    assert_drawn_from(second, exact)
    assert_drawn_from(first * 12 + second, np.outer(exact, exact).reshape(-1))


@st.composite
def sampling(draw: Any) -> SamplerParams:
    return SamplerParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 7, 127, 128, 129, 400])),
        top_p=draw(st.sampled_from([1.0, 0.9137, 0.5171, 0.0713, 0.99999])),
        min_p=draw(st.sampled_from([0.0, 0.0317, 0.713])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, -0.25])),
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_ids=[0],
    )


@settings(max_examples=150, deadline=None)
@given(
    sampling(),
    st.integers(2, 300),
    st.sampled_from([0.125, 1.0]),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)
def test_any_parameters_give_the_reference_distribution(
    params: SamplerParams, vocab_size: int, grid: float, seed: int, tokens: list[int]
) -> None:
    # Logits on a coarse grid, so that ties are everywhere, at every cut too.
    logits = np.round(np.random.default_rng(seed).normal(size=vocab_size) * 3 / grid) * grid
    exact = reference(logits, params, tokens, 1)
    for shift in (-1e-6, 1e-6):
        near = {"top_p": params.top_p + shift if params.top_p < 1 else 1.0}
        near["min_p"] = params.min_p + shift if params.min_p > 0 else 0.0
        fields = {n: getattr(params, n) for n in SamplerParams.__slots__ if n[0] != "_"}
        moved = reference(logits, SamplerParams(**{**fields, **near}), tokens, 1)
        assume(np.array_equal(moved > 0, exact > 0))
    if params.temperature == 0:
        assert draw(logits, params, 1, tokens, 1)[0] == exact.argmax()
    else:
        assert np.allclose(distribution(logits, params, tokens, 1), exact, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_p": 0.6, "top_k": 3000}, {"top_k": 4000}]
)
@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_nuclei_of_every_size_are_found(options: dict[str, Any], temperature: float) -> None:
    logits = some_logits(vocab_size=6000, spread=2.0)
    params = SamplerParams(temperature=temperature, **options)
    exact = reference(logits, params)
    assert np.allclose(distribution(logits, params), exact, rtol=2e-5, atol=1e-8)


def test_nucleus_sizes_of_the_test_above_need_every_width() -> None:
    logits = some_logits(vocab_size=6000, spread=2.0)
    sizes = [
        int((reference(logits, SamplerParams(temperature=t, top_p=0.9)) > 0).sum())
        for t in (0.2, 1.0, 5.0)
    ]
    assert sizes[0] < 128 < sizes[1] < 2048 < sizes[2]


# -- transformers as a second reference


def transformers_scores(logits: Floats, params: SamplerParams, tokens: Sequence[int]) -> Floats:
    from transformers.generation import logits_process as hf

    ids = torch.tensor([list(tokens)])
    scores = torch.tensor(logits, dtype=torch.float32)[None]
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k > 0:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    result: Floats = scores.double().softmax(dim=-1)[0].numpy()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    ],
)
def test_distributions_equal_those_of_transformers(options: dict[str, Any]) -> None:
    params = SamplerParams(**options)
    for seed in range(5):
        logits = some_logits(vocab_size=400, seed=seed, spread=3.0)
        expected = transformers_scores(logits, params, PROMPT + OUTPUT)
        found = distribution(logits, params, PROMPT + OUTPUT, len(PROMPT))
        assert np.array_equal(found > 0, expected > 0)
        assert np.allclose(found, expected, rtol=2e-5, atol=1e-8)


# -- ties and edges


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert (
        draw(np.array([0.0, 2.0, 1.0, 2.0]), SamplerParams(temperature=0.0), 3).tolist() == [1] * 3
    )


def test_ties_with_the_kth_logit_are_kept() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    kept = distribution(logits, SamplerParams(top_k=2)) > 0
    assert kept.tolist() == [False, True, True, True, True, False]


def test_ties_at_the_edge_of_the_nucleus_are_kept_in_the_order_of_ids() -> None:
    kept = distribution(np.zeros(8), SamplerParams(top_p=0.3)) > 0
    assert kept.tolist() == [True, True, True, False, False, False, False, False]


def test_all_ties_across_the_narrow_widths() -> None:
    for params in (SamplerParams(top_k=3), SamplerParams(top_p=0.49995), SamplerParams(top_k=2500)):
        exact = reference(np.zeros(5000), params)
        assert np.array_equal(distribution(np.zeros(5000), params) > 0, exact > 0)


def test_top_p_reached_exactly_takes_no_further_token() -> None:
    assert (distribution(np.zeros(4), SamplerParams(top_p=0.5)) > 0).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [{"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-300}, {"top_p": 5e-324}],
)
def test_smallest_settings_leave_the_best_token(options: dict[str, Any]) -> None:
    logits = some_logits(vocab_size=200)
    assert set(draw(logits, SamplerParams(**options), 200).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("options", [{"top_p": 1 - 1e-16}, {"top_k": 24}, {"top_k": 10**6}])
def test_largest_settings_keep_every_token(options: dict[str, Any]) -> None:
    assert (distribution(some_logits(), SamplerParams(**options)) > 0).all()


def test_a_vocabulary_of_one_token() -> None:
    for options in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}, {"temperature": 0.0}):
        assert draw(np.array([-4.0]), SamplerParams(**options), 2).tolist() == [0, 0]


EXTREME = st.sampled_from(
    [-math.inf, -3.4e38, -1e30, -200.0, -1.0, 0.0, 1e-40, 1.0, 200.0, 1e30, 3.4e38, math.inf]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(EXTREME, min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-300, 1e-6, 1.0, 100.0]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([1.0, 0.5, 1e-9]),
    st.sampled_from([1.0, 1e-300, 5e-324, 1e300]),
    st.sampled_from([0.0, 1.0]),
)
def test_extreme_logits_never_give_a_masked_token(
    logits: list[float], temperature: float, k: int, p: float, repetition: float, min_p: float
) -> None:
    assume(max(logits) > -math.inf)
    params = SamplerParams(
        temperature=temperature,
        top_k=k,
        top_p=p,
        min_p=min_p,
        repetition_penalty=repetition,
        logprobs=2,
    )
    for processed in (False, True):
        sampler = make_sampler(len(logits), processed_logprobs=processed)
        rows = [SamplerRow(params, [0], 1) for _ in range(4)]
        batch = torch.tensor(logits).repeat(4, 1)
        for token in sampler.sample(batch, rows).tokens.tolist():
            if token == -1:  # the penalty may push the only finite logit to -inf
                assert repetition == 1e300
                continue
            assert 0 <= token < len(logits)
            assert logits[token] > -math.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("processed", [False, True])
def test_a_row_without_a_token_disturbs_nobody(
    temperature: float, bad: float, processed: bool
) -> None:
    sampler = make_sampler(300, processed_logprobs=processed)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    params = SamplerParams(temperature=temperature, top_k=200, top_p=0.9, min_p=0.1, logprobs=3)
    rows = [SamplerRow(params, [1] * i, 0) for i in range(4)]
    wanted = sampler.sample(logits.clone(), rows)
    logits[1] = bad
    logits[2] = bad
    sampled = sampler.sample(logits, rows)
    none = NAN_LOGITS if math.isnan(bad) else NO_TOKEN
    assert sampled.tokens.tolist() == [wanted.tokens[0], none, none, wanted.tokens[3]]
    assert sampled.logprobs is not None
    assert wanted.logprobs is not None
    assert sampled.top is not None
    assert wanted.top is not None
    assert sampled.logprobs[[0, 3]].tolist() == wanted.logprobs[[0, 3]].tolist()
    assert bool(sampled.logprobs[[1, 2]].isnan().all())
    assert [len(ids) for ids, _ in sampled.top] == [3, 0, 0, 3]
    for i in (0, 3):
        assert sampled.top[i][0].tolist() == wanted.top[i][0].tolist()


# -- step 5


def masks(allowed: Sequence[Sequence[int] | None], vocab_size: int) -> npt.NDArray[np.int32]:
    """[R, ceil(V / 32)]: the bits of the ids that each row allows; None for all."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, ids in zip(bits, allowed, strict=True):
        row[slice(None) if ids is None else list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 300])
def test_bias_and_mask_come_behind_the_penalties(vocab_size: int) -> None:
    """Against the reference, with the two in the place that step 5 has."""
    generator = np.random.default_rng(vocab_size)
    logits = generator.normal(0.0, 3.0, vocab_size)
    bias = generator.normal(0.0, 3.0, vocab_size).astype(np.float32)
    ids = [1, 3, 5, 7, vocab_size - 1]
    params = SamplerParams(
        logit_bias={3: 2.0}, repetition_penalty=1.7, frequency_penalty=0.5, logprobs=vocab_size
    )
    x = adjusted(logits, params, PROMPT + OUTPUT, len(PROMPT)) + bias
    x[[i for i in range(vocab_size) if i not in ids]] = -np.inf
    wanted = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    tokens = np.array(PROMPT + OUTPUT)
    sampled = make_sampler(vocab_size, processed_logprobs=True).sample(
        torch.tensor(logits, dtype=torch.float32)[None],
        [SamplerRow(params, tokens, len(PROMPT))],
        Adjustment(torch.from_numpy(bias)[None], masks([ids], vocab_size)),
    )
    assert sampled.top is not None
    found = np.zeros(vocab_size)
    found[sampled.top[0][0]] = np.exp(sampled.top[0][1].astype(np.float64))
    assert np.allclose(found, wanted, atol=1e-6)
    assert int(sampled.tokens[0]) in ids


def test_masks_of_some_rows() -> None:
    logits = torch.arange(40.0).repeat(4, 1)
    rows = [SamplerRow(SamplerParams(temperature=0.0), [], 0) for _ in range(4)]
    bitmask = masks([None, [3, 33], [], [0]], 40)
    sampled = make_sampler(40).sample(logits, rows, Adjustment(bitmask=bitmask))
    assert sampled.tokens.tolist() == [39, 33, -1, 0]


def test_log_probabilities_are_those_before_the_adjustment() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    params = SamplerParams(temperature=0.0, logprobs=1)
    bias = torch.zeros(1, 40)
    bias[0, 6] = 50.0
    raw = logits.log_softmax(dim=1)[0]
    row = SamplerRow(params, [], 0)
    sampled = make_sampler(40).sample(logits, [row], Adjustment(bias))
    assert sampled.tokens.tolist() == [6]
    assert sampled.logprobs is not None
    assert sampled.top is not None
    assert float(sampled.logprobs[0]) == pytest.approx(float(raw[6]), abs=1e-5)
    assert sampled.top[0][0].tolist() == [int(raw.argmax())]


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    """Draw from two tokens left in a vocabulary of three blocks, one of them empty."""
    logits = np.full(300, -np.inf)
    logits[[3, 299]] = 0.0
    drawn = draw(logits, SamplerParams(), 2000)
    assert set(drawn.tolist()) == {3, 299}
    assert 850 < int((drawn == 3).sum()) < 1150


def test_rounding_changes_a_draw_only_at_near_ties() -> None:
    """Draw from a wide distribution over a large vocabulary, with and without bfloat16's noise:
    the draws differ about as often as the distributions do, and no more."""
    generator = np.random.default_rng(3)
    logits = generator.normal(0.0, 2.0, 20_000)
    noisy = logits + generator.normal(0.0, 0.01, len(logits))
    probabilities, of_noisy = (np.exp(x) / np.exp(x).sum() for x in (logits, noisy))
    distance = float(np.abs(probabilities - of_noisy).sum() / 2)
    before, after = (draw(x, SamplerParams(), 1000) for x in (logits, noisy))
    changed = float((before != after).mean())
    assert len(set(before.tolist())) > 500
    assert changed < 8 * distance < 0.05


def test_ids_outside_of_the_vocabulary_change_nothing() -> None:
    params = SamplerParams(logit_bias={99: 5.0, 1: 9.0}, stop_ids=[77], min_tokens=4)
    assert np.allclose(
        distribution(np.zeros(4), params),
        reference(np.zeros(4), SamplerParams(logit_bias={1: 9.0})),
    )


# -- a row is a function of itself alone


def mixed_rows() -> tuple[torch.Tensor, list[SamplerRow]]:
    options = [
        *CASES.values(),
        {"temperature": 0.0},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ]
    generator = np.random.default_rng(5)
    rows = []
    for i, option in enumerate(options * 3):
        tokens = generator.integers(0, 600, size=5 + i)
        params = SamplerParams(**option, seed=i * 977, sequence_index=i % 3, logprobs=(i % 4) - 1)
        rows.append(SamplerRow(params, tokens, 4))
    return torch.tensor(generator.normal(size=(len(rows), 600)) * 2, dtype=torch.float32), rows


def facts(sampled: Sampled, row: int) -> tuple[Any, ...]:
    assert sampled.logprobs is not None
    assert sampled.top is not None
    ids, logprobs = sampled.top[row]
    # "equal_nan" by way of text: NaN stands for "not asked for".
    return (
        int(sampled.tokens[row]),
        f"{float(sampled.logprobs[row]):.4f}",
        ids.tolist(),
        np.round(logprobs, 4).tolist(),
    )


@pytest.mark.parametrize("processed", [False, True])
def test_neighbours_and_order_change_nothing(processed: bool) -> None:
    logits, rows = mixed_rows()
    sampler = make_sampler(600, processed_logprobs=processed)
    together = sampler.sample(logits.clone(), rows)
    order = np.random.default_rng(1).permutation(len(rows))
    shuffled = sampler.sample(logits[order].clone(), [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sampler.sample(logits[i : i + 1].clone(), [rows[i]])
        assert int(alone.tokens[0]) == int(together.tokens[i]) == int(shuffled.tokens[place])
        assert facts(shuffled, place) == facts(together, int(i))
        if rows[i].params.logprobs >= 0:
            assert facts(alone, 0) == facts(together, int(i))


def test_tokens_may_be_a_list_or_an_array() -> None:
    logits, rows = mixed_rows()
    as_lists = [SamplerRow(row.params, list(map(int, row.tokens)), 4) for row in rows]
    sampler = make_sampler(600)
    assert torch.equal(
        sampler.sample(logits.clone(), rows).tokens, sampler.sample(logits.clone(), as_lists).tokens
    )


def test_bfloat16_logits_are_read_as_they_are() -> None:
    logits, rows = mixed_rows()
    narrow = logits.bfloat16()
    sampler = make_sampler(600)
    assert torch.equal(
        sampler.sample(narrow, rows).tokens, sampler.sample(narrow.float(), rows).tokens
    )


# -- log-probabilities


def test_raw_logprobs_are_of_the_unchanged_distribution() -> None:
    logits = some_logits(vocab_size=50)
    expected = logits - np.log(np.exp(logits).sum())
    params = SamplerParams(
        temperature=0.5, top_k=3, logit_bias={4: 9.0}, repetition_penalty=2.0, logprobs=5
    )
    sampled = make_sampler(50).sample(
        torch.tensor(logits, dtype=torch.float32)[None], [SamplerRow(params, [1, 2], 1)]
    )
    assert sampled.logprobs is not None
    assert sampled.top is not None
    assert float(sampled.logprobs[0]) == pytest.approx(expected[int(sampled.tokens[0])], abs=1e-5)
    ids, values = sampled.top[0]
    assert ids.dtype == np.int32
    assert values.dtype == np.float32
    assert ids.tolist() == np.argsort(-expected)[:5].tolist()
    assert np.allclose(values, expected[ids], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_may_ask_for_processed_logprobs(temperature: float) -> None:
    logits = torch.tensor(np.array([some_logits(vocab_size=50)] * 4), dtype=torch.float32)
    params = SamplerParams(temperature=temperature, top_k=9, logit_bias={4: 2.0}, logprobs=5)
    kinds = [params, attrs.evolve(params, processed_logprobs=True)] * 2
    mixed = make_sampler(50).sample(logits.clone(), [SamplerRow(p, [1, 2], 1) for p in kinds])
    assert mixed.logprobs is not None
    assert mixed.top is not None
    for processed in (False, True):
        sampler = make_sampler(50, processed_logprobs=processed)
        alike = sampler.sample(logits.clone(), [SamplerRow(params, [1, 2], 1)] * 4)
        assert alike.logprobs is not None
        assert alike.top is not None
        for row in range(int(processed), 4, 2):
            assert mixed.tokens[row] == alike.tokens[row]
            assert mixed.logprobs[row] == alike.logprobs[row]
            for mine, theirs in zip(mixed.top[row], alike.top[row], strict=True):
                assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_processed_logprobs_are_of_the_last_distribution(temperature: float) -> None:
    logits = some_logits(vocab_size=50)
    params = SamplerParams(
        temperature=temperature, top_k=3, logit_bias={4: 2.0}, repetition_penalty=2.0, logprobs=5
    )
    if temperature == 0:
        x = adjusted(logits, params, [1, 2], 1)
        expected = x - np.log(np.exp(x).sum())
    else:
        with np.errstate(divide="ignore"):
            expected = np.log(reference(logits, params, [1, 2], 1))
    sampled = make_sampler(50, processed_logprobs=True).sample(
        torch.tensor(logits, dtype=torch.float32)[None], [SamplerRow(params, [1, 2], 1)]
    )
    assert sampled.logprobs is not None
    assert sampled.top is not None
    assert float(sampled.logprobs[0]) == pytest.approx(expected[int(sampled.tokens[0])], abs=1e-5)
    ids, values = sampled.top[0]
    assert len(ids) == (5 if temperature == 0 else 3)
    assert np.allclose(values, np.sort(expected)[::-1][: len(ids)], atol=1e-5)
    assert np.allclose(values, expected[ids], atol=1e-5)


def test_equal_alternatives_stand_in_the_order_of_ids() -> None:
    params = SamplerParams(temperature=0.0, logprobs=3)
    sampled = make_sampler(200).sample(torch.zeros(1, 200), [SamplerRow(params, [], 0)])
    assert sampled.top is not None
    assert sampled.top[0][0].tolist() == [0, 1, 2]


def test_only_rows_that_ask_get_logprobs() -> None:
    rows = [SamplerRow(SamplerParams(logprobs=n), [], 0) for n in (-1, 0, 2)]
    sampled = make_sampler(9).sample(torch.zeros(3, 9), rows)
    assert sampled.logprobs is not None
    assert sampled.top is not None
    assert torch.isnan(sampled.logprobs).tolist() == [True, False, False]
    assert [len(ids) for ids, _ in sampled.top] == [0, 0, 2]
    quiet = make_sampler(9).sample(torch.zeros(1, 9), rows[:1])
    assert quiet.logprobs is None
    assert quiet.top is None
