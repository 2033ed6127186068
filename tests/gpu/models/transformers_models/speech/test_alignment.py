"""Times of tokens: the cheapest path through tokens and frames, and the weights that it is of."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import (
    WhisperGenerationMixin,
    _dynamic_time_warping,
    _median_filter,
)

from gpu.models.transformers_models.interface import AttentionCall
from gpu.models.transformers_models.speech.alignment import AligningAttention, smoothed
from gpu.models.transformers_models.speech.warping import first_frames

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 8))


def cheapest(costs: np.ndarray[Any, Any]) -> float:
    """Return the cost of the cheapest path, of all paths."""

    @cache
    def reached(token: int, frame: int) -> float:
        if token == frame == 0:
            return float(costs[0, 0])
        ways = [
            reached(*before)
            for before in ((token - 1, frame - 1), (token - 1, frame), (token, frame - 1))
            if min(before) >= 0
        ]
        return float(costs[token, frame]) + min(ways)

    return reached(costs.shape[0] - 1, costs.shape[1] - 1)


def cost_of(costs: np.ndarray[Any, Any], firsts: list[int]) -> float:
    """Return the cost of the cheapest path on which each token begins at its frame."""
    total = 0.0
    for row, begin, after in zip(costs, firsts, [*firsts[1:], None], strict=True):
        if after is None:
            total += row[begin:].sum()
        elif after == begin:
            total += row[begin]
        else:  # The next token begins with the last frame of this one, or behind it.
            total += row[begin:after].sum() + min(row[after], 0)
    return total


@given(
    SHAPES.flatmap(lambda shape: arrays.arrays(np.int64, shape, elements=st.integers(-9, 9))),
)
def test_the_path_is_the_cheapest(given_costs: np.ndarray[Any, Any]) -> None:
    costs = given_costs.astype(np.float64)
    firsts = first_frames(costs)
    assert firsts[0] == 0
    assert firsts == sorted(firsts)
    assert len(firsts) == len(costs)
    assert cost_of(costs, firsts) == cheapest(costs)


@pytest.mark.parametrize("seed", range(5))
def test_the_path_is_that_of_transformers(seed: int) -> None:
    costs = np.random.default_rng(seed).normal(size=(20, 60))
    rows, frames = _dynamic_time_warping(costs)
    begins = np.concatenate([[True], np.diff(rows) > 0])
    assert first_frames(costs) == frames[begins].tolist()


@pytest.mark.parametrize("num_frames", [1, 3, 4, 30])
def test_weights_are_standardized_and_smoothed(num_frames: int) -> None:
    weights = torch.rand(5, num_frames, generator=torch.Generator().manual_seed(3))
    weights[:, 0] = 0.25  # Told from nothing: transformers would give NaN.
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    standard = ((weights - mean) / deviation).nan_to_num(0.0)
    wanted = _median_filter(standard[None], 7)[0]
    torch.testing.assert_close(torch.from_numpy(smoothed(weights.numpy())), wanted)


def test_weights_are_those_of_the_attention() -> None:
    """Check the times against transformers' for the weights that it would have."""
    random = torch.Generator().manual_seed(5)
    num_layers, num_heads, num_tokens, num_frames, dim = 3, 2, 9, 30, 4
    heads = [(1, 0), (2, 1), (2, 0)]
    shape = (num_layers, num_heads)
    queries = torch.randn(*shape, num_tokens, dim, generator=random)
    keys = torch.randn(*shape, num_frames, dim, generator=random)
    values = torch.randn(*shape, num_frames, dim, generator=random)
    weights = (queries @ keys.mT).softmax(-1)
    attention = AligningAttention(
        lambda layer: (keys[layer], values[layer]), heads, num_tokens, num_frames
    )
    for layer in range(num_layers):
        found = attention.attend_audio(layer, queries[layer])
        torch.testing.assert_close(found, weights[layer] @ values[layer])
    output = GenerateEncoderDecoderOutput(
        sequences=torch.zeros(1, num_tokens + 1),
        cross_attentions=(tuple(each[None] for each in weights),),
    )
    config = SimpleNamespace(decoder_layers=num_layers, median_filter_width=7)
    wanted = WhisperGenerationMixin._extract_token_timestamps(
        SimpleNamespace(config=config), output, heads, num_input_ids=0
    )
    times = [0.02 * frame for frame in first_frames(-attention.mean().astype(np.float64))]
    assert times == pytest.approx(wanted[0, :-1].tolist())


def test_audio_behind_the_end_is_left_out() -> None:
    random = torch.Generator().manual_seed(7)
    query, keys = torch.randn(1, 5, 4, generator=random), torch.randn(1, 20, 4, generator=random)
    attention = AligningAttention(lambda _: (keys, keys), [(0, 0)], 5, 12)
    attention.attend_audio(0, query)
    wanted = smoothed((query[0] @ keys[0, :12].T).softmax(-1).numpy())
    np.testing.assert_allclose(attention.mean(), wanted, rtol=1e-4, atol=1e-5)


def test_a_token_sees_those_before_it() -> None:
    random = torch.Generator().manual_seed(9)
    query, key, value = torch.randn(3, 1, 2, 6, 4, generator=random)
    attention = AligningAttention(lambda _: (key[0], value[0]), [(0, 0)], 6, 6)
    found = attention.attend(
        AttentionCall(
            layer=0,
            query=query,
            key=key,
            value=value,
            mask=None,
            scale=1.0,
            softcap=None,
            sinks=None,
            others={},
        )
    )
    hidden = torch.ones(6, 6).triu(1) > 0
    wanted = (query @ key.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(found, wanted[0].transpose(0, 1))
    assert attention.positions.tolist() == list(range(6))
