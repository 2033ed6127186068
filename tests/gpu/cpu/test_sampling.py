"""The compiled sampler gives the tokens of the torch sampler, whatever its batch and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu.cpu.library import Library, load_library
from gpu.cpu.model import Floats
from gpu.cpu.sampling import CompiledSampler
from gpu.cpu.torch_model import TorchSampler
from gpu.sampling.adjustments import Adjustment
from gpu.sampling.drawn import Drawn
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from trioserve.protocol.sampling import NAN_LOGITS, NO_TOKEN, SamplerParams

pytestmark = pytest.mark.single_kernels

VOCAB = 5003
"""A prime: the last block, the last vector and the last word of a mask are not full."""

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "nearly greedy": {"temperature": 1e-35},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "large top_k": {"temperature": 1.0, "top_k": 3000},
    "top_p": {"temperature": 0.9, "top_p": 0.95},
    "small top_p": {"temperature": 1.0, "top_p": 1e-9},
    "large top_p": {"temperature": 2.0, "top_p": 1 - 1e-12},
    "both": {"temperature": 1.3, "top_k": 200, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.02},
    "all three": {"temperature": 1.5, "top_k": 500, "top_p": 0.9, "min_p": 0.001},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.7,
    },
    "biases": {"temperature": 1.0, "logit_bias": {7: 9.0, 5002: 11.0, 9999: 50.0}},
    "minimum": {"temperature": 1.0, "stop_ids": [1, 2, 3], "min_tokens": 99},
}


@pytest.fixture(scope="module")
def library(each_isa: str) -> Library:
    return load_library()


def logits_of(kind: str, rows: int, vocab_size: int = VOCAB) -> Floats:
    """[rows, vocab_size], as sharp as a model's, flat, or with many that are equal."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, vocab_size)).astype(np.float32)
    if kind == "sharp":
        for row in x:
            row[rng.integers(0, vocab_size, 40)] += np.linspace(10, 3, 40, dtype=np.float32)
    elif kind == "tied":
        x = np.round(x * 2) / 2
    return x


def rows_of(options: dict[str, Any], number: int, first_seed: int = 0) -> list[SamplerRow]:
    rng = np.random.default_rng(0)
    return [
        SamplerRow(
            SamplerParams(seed=first_seed + i, sequence_index=i % 3, **options),
            rng.integers(0, VOCAB, 60 + i).astype(np.int32),
            20,
        )
        for i in range(number)
    ]


def torch_sampler(vocab_size: int = VOCAB, *, processed_logprobs: bool = False) -> TorchSampler:
    return TorchSampler(Sampler(vocab_size, "cpu", processed_logprobs=processed_logprobs))


def assert_same(one: Drawn, other: Drawn) -> None:
    """Tokens to the last; log-probabilities up to rounding."""
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.logprobs is None) == (other.logprobs is None)
    if one.logprobs is not None and other.logprobs is not None:
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
    if one.top is None or other.top is None:
        return
    for (ids, logprobs), (other_ids, other_logprobs) in zip(one.top, other.top, strict=True):
        if len(ids) <= 20:
            assert ids.tolist() == other_ids.tolist()
        else:  # some are equal, but for rounding
            order, other_order = np.argsort(ids), np.argsort(other_ids)
            assert ids[order].tolist() == other_ids[other_order].tolist()
            np.testing.assert_allclose(
                logprobs[order], other_logprobs[other_order], rtol=1e-5, atol=1e-5
            )
        np.testing.assert_allclose(logprobs, other_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_say_why(library: Library, temperature: float) -> None:
    logits = logits_of("sharp", 5)
    logits[0, VOCAB - 1] = np.nan
    logits[1] = -np.inf
    logits[2, :] = np.nan
    logits[4, 7] = np.inf
    rows = [SamplerRow(SamplerParams(temperature=temperature), [], 0)] * 5
    words = np.full((5, -(-VOCAB // 32)), -1, dtype=np.int32)
    words[3] = 0
    adjustment = Adjustment(None, words)
    expected = torch_sampler().sample(logits.copy(), rows, adjustment)
    assert_same(
        CompiledSampler(library, VOCAB, 2).sample(logits.copy(), rows, adjustment), expected
    )
    assert expected.tokens.tolist() == [NAN_LOGITS, NO_TOKEN, NAN_LOGITS, NO_TOKEN, 7]


@pytest.mark.parametrize("kind", ["sharp", "flat", "tied"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_tokens_as_torchs(library: Library, name: str, kind: str) -> None:
    """Compare rows without near-ties: but for exp, they are the same on every machine."""
    number = 50
    logits = logits_of(kind, number)
    rows = rows_of(OPTIONS[name], number)
    compiled = CompiledSampler(library, VOCAB, 2)
    expected = torch_sampler().sample(logits.copy(), rows)
    before = logits.copy()
    assert_same(compiled.sample(logits, rows), expected)
    assert np.array_equal(logits, before), "the logits were changed, and nobody had asked for that"


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_log_probabilities(library: Library, name: str, processed: bool) -> None:
    logits = logits_of("sharp", 6)
    rows = [
        rows_of({**OPTIONS[name], "logprobs": wanted, "processed_logprobs": i % 2 == 0}, 6)[i]
        for i, wanted in enumerate((5, -1, 0, VOCAB, 1, 20))
    ]
    compiled = CompiledSampler(library, VOCAB, 2, processed_logprobs=processed)
    torchs = torch_sampler(processed_logprobs=processed)
    expected = torchs.sample(logits.copy(), rows)
    assert_same(compiled.sample(logits.copy(), rows), expected)


@pytest.mark.parametrize("processed", [False, True])
def test_masks_and_biases_of_processors(library: Library, processed: bool) -> None:
    rng = np.random.default_rng(3)
    words = rng.integers(-(2**31), 2**31, (8, -(-VOCAB // 32)), dtype=np.int32)
    words[2] = -1
    words[3] = 0
    bias = torch.from_numpy(rng.standard_normal((8, VOCAB)).astype(np.float32))
    compiled = CompiledSampler(library, VOCAB, 2, processed_logprobs=processed)
    torchs = torch_sampler(processed_logprobs=processed)
    mixed = [rows_of({**options, "logprobs": 3}, 8)[i] for i, options in enumerate(SOME)]
    for adjustment in (Adjustment(bias, words), Adjustment(bias), Adjustment(None, words)):
        logits = logits_of("sharp", 8)
        expected = torchs.sample(logits.copy(), mixed, adjustment)
        assert_same(compiled.sample(logits.copy(), mixed, adjustment), expected)
        assert (expected.tokens[3] == -1) == (adjustment.bitmask is not None)


SOME = list(OPTIONS.values())[:8]


def test_a_row_depends_on_nothing_but_itself(library: Library) -> None:
    """Vary the batch and the number of threads."""
    logits = logits_of("flat", len(OPTIONS))
    rows = [rows_of(options, 1, seed)[0] for seed, options in enumerate(OPTIONS.values())]
    alone = CompiledSampler(library, VOCAB, 1)
    each = [
        int(alone.sample(logits[i : i + 1].copy(), [row]).tokens[0]) for i, row in enumerate(rows)
    ]
    for threads in (1, 2, 3):
        together = CompiledSampler(library, VOCAB, threads).sample(logits.copy(), rows)
        assert together.tokens.tolist() == each


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 127, 128, 129, 300])
def test_small_vocabularies(library: Library, vocab_size: int) -> None:
    for options in OPTIONS.values():
        logits = logits_of("flat", 20, vocab_size)
        rows = rows_of({**options, "logprobs": 2}, 20)
        expected = torch_sampler(vocab_size).sample(logits.copy(), rows)
        assert_same(CompiledSampler(library, vocab_size, 2).sample(logits, rows), expected)


def chi_square(observed: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    expected = probabilities * observed.sum()
    return float((((observed - expected) ** 2) / expected).sum())


def test_many_draws_follow_the_distribution_of_many_blocks(library: Library) -> None:
    """Test the race between blocks: of 300 blocks, one token each is likely."""
    vocab_size, number = 300 * 128, 5_000
    x = np.full((1, vocab_size), -np.inf, dtype=np.float32)
    x[0, ::128] = np.linspace(0, 2, 300)
    sampler = CompiledSampler(library, vocab_size, 2)
    rows = rows_of({"temperature": 1.0}, 1)
    counts = np.zeros(300, dtype=np.int64)
    for seed in range(0, number, 100):
        rows = rows_of({"temperature": 1.0}, 100, seed)
        tokens = sampler.sample(x.repeat(100, axis=0), rows).tokens
        counts += np.bincount(tokens // 128, minlength=300)
    probabilities = torch.softmax(torch.from_numpy(x[0, ::128]).double(), 0).numpy()
    assert chi_square(counts, probabilities) < 299 + 5 * (2 * 299) ** 0.5
