"""The share of prompts, as properties of the pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.scheduler.prompt_share import (
    FULL_RATE,
    OVERHEAD,
    PATIENCE,
    SHORT,
    PromptWork,
    longest_step,
    response_ratio,
    stretch_of,
    tokens_alone,
    tokens_beside,
)
from trioserve.scheduler.step_time import StepLoad, StepTimeModel

FIXED, DECODE, TOKEN, CONTEXT = 5e-3, 5e-4, 4e-4, 1e-7


def known_model() -> StepTimeModel:
    """Return a model that has learned these costs from some steps."""
    model = StepTimeModel()
    for number in range(40):
        load = StepLoad(decodes=number % 5, prompt_tokens=number % 7 * 40, context=number % 3 * 9e3)
        work = load.decodes * DECODE + load.prompt_tokens * TOKEN + load.context * CONTEXT
        model.observe(load, FIXED + work)
    return model


MODEL = known_model()

prompts = st.builds(
    lambda remaining, context, part, waited: PromptWork(
        remaining=remaining, context=context, skipped=int(context * part), waited=waited
    ),
    remaining=st.integers(1, 4000),
    context=st.integers(0, 4000),
    part=st.floats(0, 1),
    waited=st.floats(0, 100),
)
queues = st.lists(prompts, min_size=1, max_size=12)
decode_times = st.floats(1e-3, 1)
targets = st.none() | st.floats(1e-3, 1)


def test_a_prompt_by_itself_isnt_stretched() -> None:
    assert stretch_of(MODEL, [PromptWork(remaining=1000)]) == 1.0


def test_a_burst_stretches_its_last_prompt_by_its_length() -> None:
    burst = [PromptWork(remaining=500)] * 16
    assert stretch_of(MODEL, burst) == pytest.approx(16)


def test_cached_tokens_dont_count() -> None:
    alone = PromptWork(remaining=100, context=900, skipped=900, waited=1.0)
    assert alone.seconds(MODEL) == alone.seconds_alone(MODEL)
    begun = PromptWork(remaining=100, context=900, waited=1.0)
    assert begun.seconds_alone(MODEL) > 5 * begun.seconds(MODEL)
    assert response_ratio(MODEL, begun) == response_ratio(MODEL, alone)
    assert stretch_of(MODEL, [begun]) < stretch_of(MODEL, [alone])


@given(queues, st.floats(0, 10))
def test_waiting_only_adds_to_the_stretch(queue: list[PromptWork], seconds: float) -> None:
    later = [
        PromptWork(
            remaining=each.remaining,
            context=each.context,
            skipped=each.skipped,
            waited=each.waited + seconds,
        )
        for each in queue
    ]
    assert stretch_of(MODEL, later) >= stretch_of(MODEL, queue) >= 1.0


def test_a_target_holds_until_prompts_starve() -> None:
    assert longest_step(0.01, 1.0, None) == pytest.approx(0.02)
    assert longest_step(0.01, 8.0, None) == pytest.approx(0.05)
    assert longest_step(0.01, PATIENCE, 0.03) == pytest.approx(0.03)
    assert longest_step(0.01, 3 * PATIENCE, 0.03) == pytest.approx(0.09)
    assert longest_step(0.01, 1.0, 0.005) == pytest.approx(0.005)
    assert longest_step(0.01, 3 * PATIENCE, 0.005) == pytest.approx(0.03)


@given(queues, decode_times, targets)
def test_the_step_is_as_long_as_it_may_be(
    queue: list[PromptWork], decode: float, target: float | None
) -> None:
    """The tokens take at most the time that is left, and one more would take longer."""
    left = longest_step(decode, stretch_of(MODEL, queue), target) - decode

    def seconds(count: int) -> float:
        total = 0.0
        for each in queue:
            own = min(count, each.remaining)
            total += MODEL.seconds_of(own, each.context)
            count -= own
        return total

    count = tokens_beside(MODEL, queue, decode, target)
    every = sum(each.remaining for each in queue)
    assert 1 <= count <= every
    if count > 1:
        assert seconds(count) <= left * 1.001
    if count < every:
        assert seconds(count + 1) >= left * 0.999


def test_a_step_without_decodes_is_as_long_as_its_fixed_cost_suggests() -> None:
    model = known_model()
    model.coefficients[0] = fixed = 4 * FIXED
    count = tokens_alone(model, [PromptWork(remaining=8000)])
    assert fixed / (fixed + model.seconds_of(int(count), 0)) == pytest.approx(OVERHEAD, rel=0.02)


def test_a_step_without_decodes_has_products_at_their_full_rate_if_it_stays_short() -> None:
    prompts = [PromptWork(remaining=8000)]
    model = StepTimeModel()
    for cost, expected in ((1e-4, FULL_RATE), (5e-3, SHORT / 5e-3)):
        model.coefficients = [1e-6, DECODE, cost, 0.0]
        model._num_with_decodes = model._kinds[True].number = 1
        assert tokens_alone(model, prompts) == pytest.approx(expected)


def test_a_step_without_decodes_has_no_limit_while_nothing_is_known() -> None:
    assert tokens_alone(StepTimeModel(), [PromptWork(remaining=8000)]) == float("inf")
    assert tokens_alone(MODEL, []) == float("inf")


@given(queues)
def test_nothing_known_ranks_by_tokens(queue: list[PromptWork]) -> None:
    model = StepTimeModel()
    for each in queue:
        assert response_ratio(model, each) == pytest.approx(each.waited / each.remaining * 1e3)
