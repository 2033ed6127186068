"""Holds of decodes: when they begin, go on and end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.test_prompt_pace import MACHINES, Life
from trioserve.scheduler.decode_hold import BRIEF, BURST, EVERY, LONGEST, MOST, DecodeHold
from trioserve.scheduler.prompt_share import PromptWork
from trioserve.scheduler.step_time import FIXED, StepLoad, StepTimeModel
from trioserve.scheduler.token_counts import Ints

MODEL = StepTimeModel()
MODEL.observe(StepLoad(decodes=4), 0.01)
MODEL.observe(StepLoad(decodes=4, prompt_tokens=100), 0.06)
SECOND = round(1 / MODEL.seconds_of(1, 0))
"""Tokens of prompts that take a second."""


def burst(seconds: float = 1.0, *, size: int = 8, waited: float = 0.0) -> list[PromptWork]:
    return [PromptWork(remaining=int(seconds * SECOND / size), waited=waited)] * size


def streams_of(count: int, first: int = 0) -> Ints:
    return np.arange(first, first + count)


def is_due(
    hold: DecodeHold, prompts: list[PromptWork], streams: int = 4, now: float = 0, first: int = 0
) -> bool:
    return hold.is_due(MODEL, prompts, streams_of(streams, first), now)


def hold_for(hold: DecodeHold, streams: int, now: float) -> None:
    """Note a step that holds so many streams."""
    hold.note_hold(streams_of(streams), now)


def test_a_hold_begins_with_a_burst_alone() -> None:
    hold = DecodeHold()
    assert is_due(hold, burst())
    assert is_due(hold, burst(size=int(BURST)))
    assert not is_due(hold, burst(size=int(BURST) - 1))
    assert not is_due(hold, [])
    assert not hold.is_due(StepTimeModel(), burst(), streams_of(4), 0.0)


def test_a_burst_that_takes_too_long_holds_nothing() -> None:
    hold = DecodeHold()
    assert not is_due(hold, burst(1.1 * LONGEST))
    assert not is_due(hold, burst(0.6 * LONGEST, waited=0.5 * LONGEST))


def test_prompts_that_take_less_than_a_step_hold_no_streams_from_before() -> None:
    step, size = MODEL.coefficients[FIXED], int(BURST)
    assert step > 0
    streams, continued = streams_of(4), PromptWork(remaining=1, context=99, skipped=99, waited=0.5)
    for prompts, holds in (
        (burst(2 * step, size=size), True),
        (burst(0.9 * step, size=size), False),
        ([continued], False),
    ):
        assert DecodeHold().is_due(MODEL, prompts, streams, 0.0, BRIEF) == holds
        assert DecodeHold().is_due(MODEL, prompts, streams, 0.0)


def test_streams_that_ran_before_are_held_briefly() -> None:
    hold = DecodeHold()
    assert hold.is_due(MODEL, burst(0.9 * BRIEF), streams_of(4), 0.0, BRIEF)
    assert not hold.is_due(MODEL, burst(1.1 * BRIEF), streams_of(4), 0.0, BRIEF)
    assert hold.is_due(MODEL, burst(0.9 * BRIEF), streams_of(4), 0.0, BRIEF)
    hold.note_hold(streams_of(4), 10.0, BRIEF)
    assert is_due(hold, burst(0.4 * BRIEF, size=1), now=10.0 + 0.5 * BRIEF)
    assert not is_due(hold, burst(0.6 * BRIEF, size=1), now=10.0 + 0.5 * BRIEF)


def test_a_hold_goes_on_until_the_prompts_are_computed_or_it_is_too_long() -> None:
    hold = DecodeHold()
    hold_for(hold, 4, now=10.0)
    assert is_due(hold, burst(LONGEST - 1.1, size=1), now=11.0)
    assert not is_due(hold, burst(LONGEST - 0.9, size=1), now=11.0)
    assert not is_due(hold, [], now=11.0)


def test_the_next_hold_comes_after_many_steps_and_is_as_long_as_the_time_between() -> None:
    hold = DecodeHold()
    hold_for(hold, 4, now=10.0)
    hold.note_step(4, now=11.0)
    for step in range(1, EVERY + 1):
        assert is_due(hold, burst(0.5), now=12.0) == (step == EVERY)
        hold.note_step(4, now=12.0)
    assert is_due(hold, burst(0.95), now=12.0)
    assert not is_due(hold, burst(1.05), now=12.0)
    hold_for(hold, 4, now=12.0)
    assert is_due(hold, burst(0.4), now=12.5)
    assert not is_due(hold, burst(0.6), now=12.5)


def test_streams_that_were_not_held_may_be_at_once() -> None:
    hold = DecodeHold()
    hold_for(hold, 4, now=10.0)
    hold.note_step(4, now=11.0)
    assert is_due(hold, burst(), now=11.5, first=4)
    assert not is_due(hold, burst(), now=11.5, first=3)
    hold.note_hold(streams_of(4, first=4), now=11.5)
    assert is_due(hold, burst(LONGEST - 1.1), now=12.5, first=4)
    assert not is_due(hold, burst(LONGEST - 0.9), now=12.5, first=4)
    hold.note_step(4, now=13.0)
    assert not is_due(hold, burst(), now=14.0, first=4)


def test_a_hold_of_many_streams_comes_after_as_many_gaps() -> None:
    """It may hold all that decode, and all whose prompts it computes."""
    hold = DecodeHold()
    assert not is_due(hold, burst(), MOST - 7)
    assert is_due(hold, burst(), MOST - 8)
    hold_for(hold, MOST, now=10.0)
    for step in range(3 * EVERY + 1):
        hold.note_step(4, now=20.0)
        assert is_due(hold, burst(0.1), now=30.0) == (step >= 3 * EVERY - 1)


@given(
    st.lists(st.tuples(st.floats(0.01, 3), st.integers(1, 20), st.floats(0, 2)), max_size=300),
    st.integers(1, MOST),
)
def test_holds_are_rare_and_short_whatever_comes(
    arrivals: list[tuple[float, int, float]], streams: int
) -> None:
    hold = DecodeHold()
    seconds = {True: 0.1, False: 0.03}
    steps, now = list[bool](), 0.0
    for size in arrivals * 3:
        holds = is_due(hold, burst(size[0], size=size[1], waited=size[2]), streams, now)
        if holds:
            hold.note_hold(streams_of(streams), now)
        else:
            hold.note_step(streams, now)
        steps.append(holds)
        now += seconds[holds]
    groups = [(key, len(list(group))) for key, group in itertools.groupby(steps)]
    for place, (holds, number) in enumerate(groups):
        if holds:
            assert (number - 1) * seconds[True] <= LONGEST
        if not holds and 0 < place < len(groups) - 1:
            assert number >= EVERY
            following = groups[place + 1][1]
            assert (following - 1) * seconds[True] <= number * seconds[False]
    gaps = streams * steps.count(False)
    assert EVERY * streams * [key for key, _ in groups].count(True) <= gaps + MOST * EVERY


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
