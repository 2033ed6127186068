"""The choice of a worker: by predicted times, and by the simpler policies."""

from __future__ import annotations

import itertools
from collections import Counter

import attrs
import hypothesis
import pytest
from hypothesis import strategies

from trioserve.engine.routing.policy import (
    Policy,
    WorkerLoad,
    predicted_cost,
    predicted_ttft,
)
from trioserve.scheduler.step_time import StepLoad, StepTimeModel

FIXED, DECODE, TOKEN, CONTEXT = 0.008, 0.0002, 0.0001, 1e-8


def model(speed: float = 1.0) -> StepTimeModel:
    """Return a model that has learned the times of a machine."""
    made = StepTimeModel()
    for decodes, prompt, context in itertools.product((0, 4, 32), (0, 64, 512), (1000, 20_000)):
        load = StepLoad(decodes=decodes, prompt_tokens=prompt, context=context)
        seconds = FIXED + decodes * DECODE + prompt * TOKEN + context * CONTEXT
        made.observe(load, seconds / speed)
    return made


KNOWN = model()


def load(**fields: object) -> WorkerLoad:
    return WorkerLoad(**{"model": KNOWN, **fields})  # type: ignore[arg-type]


def test_an_idle_worker_takes_the_time_of_the_prompt() -> None:
    seconds = FIXED + 2000 * TOKEN
    assert predicted_ttft(load(), 2000) == pytest.approx(seconds, rel=0.1)
    assert predicted_ttft(load(cached=1600), 2000) == pytest.approx(FIXED + 400 * TOKEN, rel=0.2)
    on_host = predicted_ttft(load(cached_on_host=1600), 2000)
    assert predicted_ttft(load(cached=1600), 2000) < on_host < 0.5 * seconds


LOADS = strategies.builds(
    load,
    cached=strategies.integers(0, 1000),
    prompt_tokens=strategies.integers(0, 20_000),
    num_decodes=strategies.integers(0, 64),
    num_ahead=strategies.integers(0, 8),
)


@hypothesis.given(LOADS, strategies.integers(1100, 4000))
def test_more_work_never_makes_a_worker_cheaper(given: WorkerLoad, prompt: int) -> None:
    cost = predicted_cost(given, prompt)
    for more in (
        {"prompt_tokens": given.prompt_tokens + 500},
        {"num_ahead": given.num_ahead + 1},
        {"model": model(speed=0.5)},
    ):
        assert predicted_cost(attrs.evolve(given, **more), prompt) >= cost * (1 - 1e-6)
    assert (
        predicted_cost(attrs.evolve(given, cached=given.cached + 64), prompt) <= cost * 1.02
    )  # a step more


def test_a_cached_prefix_is_left_only_where_waiting_costs_more() -> None:
    policy = Policy()
    cached = load(cached=1900, prompt_tokens=1000)
    assert policy.choose([load(), cached, load()], 2000) == 1
    cached = load(cached=1900, prompt_tokens=20_000)
    assert policy.choose([cached, load()], 2000) == 1


def test_a_slower_worker_gets_less() -> None:
    slow = load(model=model(speed=0.5))
    policy = Policy()
    assert policy.choose([slow, load()], 1000) == 1
    assert policy.choose([slow, load(prompt_tokens=4000, num_decodes=8)], 1000) == 0


def test_equals_take_turns() -> None:
    policy = Policy()
    assert [policy.choose([load(), load(), load()], 100) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_other_policies() -> None:
    few, many = load(num_decodes=2), load(num_decodes=9, cached=512)
    assert Policy("least_loaded").choose([many, few], 600) == 1
    assert Policy("prefix").choose([few, many], 600) == 1
    turns = Policy("round_robin")
    assert [turns.choose([few, many], 600) for _ in range(3)] == [0, 1, 0]


def test_with_a_temperature_worse_ones_are_drawn_now_and_then() -> None:
    policy = Policy(temperature=0.5, seed=1)
    loads = [load(), load(prompt_tokens=1500), load(prompt_tokens=50_000)]
    drawn = Counter(policy.choose(loads, 1000) for _ in range(500))
    assert drawn[0] > drawn[1] > drawn[2]
    assert drawn[1] > 20


def test_nothing_is_known_at_first() -> None:
    unknown = WorkerLoad(model=StepTimeModel())
    busy = attrs.evolve(unknown, prompt_tokens=3000)
    assert Policy().choose([busy, unknown], 100) == 1
    # Workers without steps so far are taken to be like the others.
    fast = load(model=model(speed=1000.0), num_decodes=1)
    assert Policy().choose([unknown, fast], 2000) == 0
