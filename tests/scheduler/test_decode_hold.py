"""Holds of decodes: when they begin, go on and end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.test_prompt_pace import MACHINES, Life
from trioserve.scheduler.decode_hold import BURST, EVERY, LONGEST, DecodeHold
from trioserve.scheduler.prompt_share import PromptWork
from trioserve.scheduler.step_time import StepLoad, StepTimeModel

MODEL = StepTimeModel()
MODEL.observe(StepLoad(decodes=4), 0.01)
MODEL.observe(StepLoad(decodes=4, prompt_tokens=100), 0.06)
SECOND = round(1 / MODEL.seconds_of(1, 0))
"""Tokens of prompts that take a second."""
DECODES, PROMPTS = StepLoad(decodes=4), StepLoad(prompt_tokens=SECOND // 10)


def burst(seconds: float = 1.0, *, size: int = 8, waited: float = 0.0) -> list[PromptWork]:
    return [PromptWork(remaining=int(seconds * SECOND / size), waited=waited)] * size


def test_a_hold_begins_with_a_burst_alone() -> None:
    hold = DecodeHold()
    assert hold.is_due(MODEL, burst(), 4)
    assert hold.is_due(MODEL, burst(size=int(BURST)), 4)
    assert not hold.is_due(MODEL, burst(size=int(BURST) - 1), 4)
    assert not hold.is_due(MODEL, [], 4)
    assert not hold.is_due(StepTimeModel(), burst(), 4)


def test_a_burst_that_takes_too_long_holds_nothing() -> None:
    hold = DecodeHold()
    assert not hold.is_due(MODEL, burst(1.1 * LONGEST), 4)
    assert not hold.is_due(MODEL, burst(0.6 * LONGEST, waited=0.5 * LONGEST), 4)


def test_a_hold_goes_on_until_the_prompts_are_computed_or_it_is_too_long() -> None:
    hold = DecodeHold()
    hold.note(MODEL, PROMPTS, holds=True)
    held = MODEL.predict(PROMPTS)
    assert hold.is_due(MODEL, burst(LONGEST - held - 0.1, size=1), 4)
    assert not hold.is_due(MODEL, burst(LONGEST - held + 0.1, size=1), 4)
    assert not hold.is_due(MODEL, [], 4)


def test_the_next_hold_comes_after_many_gaps_and_is_as_long_as_they_were() -> None:
    hold = DecodeHold()
    hold.note(MODEL, PROMPTS, holds=True)
    for step in range(1, 3 * EVERY + 1):  # there are four streams, and eight more will be held
        hold.note(MODEL, DECODES, holds=False)
        assert hold.is_due(MODEL, burst(0.1), 4) == (step == 3 * EVERY)
    passed = 3 * EVERY * MODEL.predict(DECODES)
    longest = min(passed, LONGEST)
    assert hold.is_due(MODEL, burst(0.95 * longest), 4)
    assert not hold.is_due(MODEL, burst(1.05 * longest), 4)


@given(
    st.lists(st.tuples(st.floats(0.01, 3), st.integers(1, 20), st.floats(0, 2)), max_size=300),
    st.integers(1, 64),
)
def test_holds_are_rare_and_short_whatever_comes(
    arrivals: list[tuple[float, int, float]], streams: int
) -> None:
    hold = DecodeHold()
    decodes = StepLoad(decodes=streams)
    steps: list[bool] = []
    for seconds, size, waited in arrivals * 3:
        holds = hold.is_due(MODEL, burst(seconds, size=size, waited=waited), streams)
        hold.note(MODEL, PROMPTS if holds else decodes, holds=holds)
        steps.append(holds)
    groups = [(key, len(list(group))) for key, group in itertools.groupby(steps)]
    own, other = MODEL.predict(PROMPTS), MODEL.predict(decodes)
    for place, (holds, number) in enumerate(groups):
        if holds:
            assert number * own <= LONGEST + own
        if not holds and 0 < place < len(groups) - 1:
            assert number * streams >= EVERY * streams
            following = groups[place + 1][1]
            assert (following - 1) * own <= number * other


@pytest.mark.parametrize("limits", [{"itl_target": 0.03}, {"scheduling_policy": "priority"}])
def test_a_target_and_priorities_have_no_holds(limits: dict[str, object]) -> None:
    life = Life.of(MACHINES["zen4"], **limits)
    streams = life.decoding(8)
    began = life.bench.now
    prompts = [life.submit(100, 1) for _ in range(16)]
    life.run(lambda: all(life.tokens[prompt] for prompt in prompts))
    assert life.gaps(streams, began, life.bench.now)[-1] < 0.3


def test_prompts_that_cant_be_admitted_hold_nothing() -> None:
    """All slots are taken: streams decode while a burst waits for one."""
    life = Life.of(MACHINES["zen4"])
    streams = life.decoding(64)
    began = life.bench.now
    for _ in range(16):
        life.submit(100, 1)
    life.run(lambda: life.bench.now > began + 2)
    assert life.gaps(streams, began, life.bench.now)[-1] < 0.3
