"""The model of a step's time: on known costs with noise, and on steps that were recorded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_times import recorded_steps
from trioserve.scheduler.step_time import NUM_LATEST, StepLoad, StepTimeModel

RECORDED = sorted((Path(__file__).parent / "step_times").glob("*.jsonl"))

costs = st.builds(
    lambda token, steps, rows, contexts: (token * steps, token * rows, token, token * contexts),
    token=st.floats(1e-5, 1e-2),
    steps=st.floats(1, 100),
    rows=st.floats(0.5, 10),
    contexts=st.floats(1e-5, 1e-3),
)
"""Seconds of a step, a decode, a token of a prompt and a token of context."""
seeds = st.integers(0, 1 << 30)


def loads(rng: random.Random) -> Iterator[StepLoad]:
    """Yield steps as a server has them: some only decode, some compute prompts, most do both."""
    while True:
        decodes = rng.randint(0, 32)
        tokens = rng.randint(1, 256) if not decodes or rng.random() < 0.6 else 0
        context = decodes * rng.randint(50, 1000) + tokens * rng.randint(0, 2000)
        yield StepLoad(decodes=decodes, prompt_tokens=tokens, context=context)


def cost(of: tuple[float, ...], load: StepLoad) -> float:
    fixed, decode, token, context = of
    work = load.decodes * decode + load.prompt_tokens * token + load.context * context
    return fixed + work


def taught(of: tuple[float, ...], rng: random.Random, number: int = 200) -> StepTimeModel:
    """Return a model after steps with a tenth of noise, of which one in twenty was stopped."""
    model = StepTimeModel()
    for _, load in zip(range(number), loads(rng), strict=False):
        seconds = cost(of, load) * rng.lognormvariate(0, 0.1)
        model.observe(load, seconds * (rng.uniform(3, 20) if rng.random() < 0.05 else 1))
    return model


def errors(model: StepTimeModel, of: tuple[float, ...], rng: random.Random) -> list[float]:
    """Return the ratios of predicted to true times, sorted."""
    steps = [load for _, load in zip(range(100), loads(rng), strict=False)]
    return sorted(model.predict(load) / cost(of, load) for load in steps)


@settings(max_examples=40)
@given(costs, seeds)
def test_known_costs_are_found_under_noise_and_outliers(of: tuple[float, ...], seed: int) -> None:
    rng = random.Random(seed)
    found = errors(taught(of, rng), of, rng)
    assert 0.85 < statistics.median(found) < 1.2
    assert found[5] > 0.6
    assert found[-5] < 1.5


@settings(max_examples=40)
@given(costs, seeds, st.sampled_from([1 / 3, 3.0, 10.0]))
def test_another_speed_of_the_machine_is_followed_in_few_steps(
    of: tuple[float, ...], seed: int, ratio: float
) -> None:
    rng = random.Random(seed)
    model = taught(of, rng)
    changed = tuple(each * ratio for each in of)
    for _, load in zip(range(2 * NUM_LATEST), loads(rng), strict=False):
        model.observe(load, cost(changed, load))
    assert 0.75 < statistics.median(errors(model, changed, rng)) < 1.33


@settings(max_examples=40)
@given(costs, seeds)
def test_a_long_time_of_decodes_alone_keeps_the_cost_of_prompts(
    of: tuple[float, ...], seed: int
) -> None:
    rng = random.Random(seed)
    model = taught(of, rng)
    for step in range(1000):
        load = StepLoad(decodes=8, context=8 * (100 + step))
        model.observe(load, cost(of, load) * 3 * rng.lognormvariate(0, 0.1))
    slower = tuple(each * 3 for each in of)
    prompt = StepLoad(prompt_tokens=256, context=256 * 128)
    assert 0.6 < model.predict(prompt) / cost(slower, prompt) < 1.67


@given(
    st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(0, 4096), st.floats(0, 1e8), st.integers(0, 10**10)
        ),
        max_size=60,
    )
)
def test_no_cost_is_ever_negative(steps: list[tuple[int, int, float, int]]) -> None:
    model = StepTimeModel()
    for decodes, tokens, context, micros in steps:
        load = StepLoad(decodes=decodes, prompt_tokens=tokens, context=context)
        model.observe(load, micros / 1e6)
        assert min(model.coefficients) >= 0
        assert model.tokens_within(0.01, 100) >= 0


@given(costs, seeds, st.floats(1e-3, 1), st.integers(0, 8000))
def test_the_tokens_within_a_time_take_that_time(
    of: tuple[float, ...], seed: int, seconds: float, context: int
) -> None:
    model = taught(of, random.Random(seed), 50)
    tokens = model.tokens_within(seconds, context)
    whole = int(tokens)
    assert model.seconds_of(whole, context) <= seconds * 1.001
    assert model.seconds_of(whole + 1, context) >= seconds * 0.999


def test_a_free_token_has_no_bound() -> None:
    assert StepTimeModel().tokens_within(0.1, 0) == float("inf")


def test_few_steps_are_enough_to_begin() -> None:
    of = (5e-3, 5e-4, 4e-4, 2e-7)
    model = StepTimeModel()
    for load in (
        StepLoad(prompt_tokens=256, context=32768),
        StepLoad(decodes=2, prompt_tokens=16, context=4352),
    ):
        assert not model.is_known
        model.observe(load, cost(of, load))
    assert model.is_known
    step = StepLoad(decodes=3, prompt_tokens=64, context=8192)
    assert 0.7 < model.predict(step) / cost(of, step) < 2


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_steps_are_predicted(path: Path) -> None:
    """Predict each step from those before it."""
    model, found = StepTimeModel(), list[float]()
    for load, seconds in recorded_steps(path):
        if model.is_known:
            found.append(model.predict(load) / seconds)
        model.observe(load, seconds)
    found.sort()
    assert len(found) > 100
    assert 0.8 < statistics.median(found) < 1.25
    assert found[len(found) // 20] > 0.4
    assert found[-len(found) // 20] < 2.5
