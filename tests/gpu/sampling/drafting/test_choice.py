"""The choice of drafts against all choices, and the measured times that it is made from."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies

from gpu.sampling.drafting.acceptance import Acceptance
from gpu.sampling.drafting.choice import (
    LEAST_GAIN,
    choose_depth,
    choose_drafts,
    first_within,
)
from gpu.sampling.drafting.sources import Draft, DraftKind
from gpu.sampling.drafting.step_times import StepTimes

CANDIDATES = strategies.lists(
    strategies.lists(strategies.floats(0.01, 1.0), min_size=1, max_size=4).map(
        lambda each: list(itertools.accumulate(each, operator.mul))
    ),
    max_size=4,
)
"""For each of some sequences, the probabilities that the first 1, 2, … drafts are all accepted."""


def falling(probability: float, count: int) -> list[float]:
    return [probability**depth for depth in range(1, count + 1)]


def rate_of(
    num_rows: int,
    candidates: list[list[float]],
    chosen: tuple[int, ...],
    seconds: Callable[[int, int], float],
) -> float:
    gains = (sum(each[:count]) for each, count in zip(candidates, chosen, strict=True))
    return (num_rows + sum(gains)) / seconds(num_rows, sum(chosen))


@hypothesis.given(
    strategies.integers(1, 8), CANDIDATES, strategies.floats(0.0, 2.0), strategies.floats(0.0, 0.2)
)
def test_no_other_choice_gives_more_tokens_a_second(
    num_rows: int, candidates: list[list[float]], slope: float, bend: float
) -> None:
    def seconds(num_tokens: int, num_drafts: int) -> float:
        return 10 + slope * num_tokens + bend * num_tokens**2 + 0.5 * num_drafts

    chosen = tuple(choose_drafts(num_rows, candidates, seconds))
    every = list(itertools.product(*(range(len(each) + 1) for each in candidates)))
    assert chosen in every
    best = max(rate_of(num_rows, candidates, other, seconds) for other in every)
    without = num_rows / seconds(num_rows, 0)
    if any(chosen):
        assert rate_of(num_rows, candidates, chosen, seconds) == pytest.approx(best)
    else:
        assert best <= LEAST_GAIN * without * (1 + 1e-9)


@hypothesis.given(strategies.integers(0, 10), CANDIDATES)
def test_no_more_are_chosen_than_there_is_room_for(
    room: int, candidates: list[list[float]]
) -> None:
    """With steps that take no longer for a draft, the most probable are chosen."""
    free = choose_drafts(1, candidates, lambda *_: 1.0, room)
    assert sum(free) <= room
    every = choose_drafts(1, candidates, lambda *_: 1.0)
    assert sum(free) in (0, min(room, sum(every)))
    counts = [len(each) for each in candidates]
    within = first_within(room, counts)
    assert sum(within) == min(room, sum(counts))
    assert all(map(operator.le, within, counts))
    assert first_within(None, counts) == counts


def test_drafts_fade_where_rows_cost_time() -> None:
    """Two rows use what the weights' reading leaves free; at 32 each row costs its share."""
    times = StepTimes({1: 8.0, 8: 9.0, 16: 12.0, 32: 24.0, 64: 48.0})
    few = choose_drafts(2, [falling(0.8, 7)] * 2, times.seconds)
    many = choose_drafts(32, [falling(0.8, 7)] * 32, times.seconds)
    assert sum(few) >= 6
    assert many == [0] * 32


def test_times_between_and_beyond_the_measured() -> None:
    times = StepTimes({4: 5.0, 1: 2.0, 2: 9.0, 8: 9.0})
    assert [times.seconds(count) for count in (1, 2, 3, 6, 10)] == [2.0, 5.0, 5.0, 7.0, 11.0]


def test_a_long_context_takes_its_time_with_drafts_and_without() -> None:
    times = StepTimes({1: 2.0, 8: 4.0})
    for _ in range(200):
        times.observe(8, 0, 10.0)
    assert times.seconds(1) == pytest.approx(8.0, rel=1e-3)
    assert times.seconds(8) == pytest.approx(10.0, rel=1e-3)
    assert times.seconds(1, 7) == pytest.approx(10.0, rel=1e-3)


def test_what_a_draft_costs_is_learned() -> None:
    times = StepTimes({1: 2.0, 8: 4.0})
    for _ in range(200):
        times.observe(1, 7, 11.0)
    assert times.seconds(1) == 2.0
    assert times.seconds(1, 7) == pytest.approx(11.0, rel=1e-3)


def test_a_machine_that_was_busy_while_it_was_measured_is_learned() -> None:
    times = StepTimes({1: 2.0, 8: 4.0})
    for _ in range(200):
        times.observe(1, 0, 1.5)
    assert times.seconds(1) == pytest.approx(1.5, rel=1e-3)
    assert times.seconds(1, 7) == pytest.approx(3.5, rel=1e-3)
    for _ in range(200):
        times.observe(1, 0, 0.1)
    assert times.seconds(1) == 1.0


def test_a_step_that_was_disturbed_changes_little() -> None:
    times = StepTimes({1: 2.0, 8: 4.0})
    times.observe(1, 0, 50.0)
    times.observe(1, 7, 90.0)
    assert times.seconds(1) < 2.1
    assert times.seconds(1, 7) < 4.4


def draft(match_length: int, count: int = 1, kind: DraftKind = DraftKind.OWN) -> Draft:
    return Draft([0] * count, match_length, kind)


def test_acceptance_is_learned_by_slot_and_by_match() -> None:
    acceptance = Acceptance()
    first = acceptance.probability(0, draft(20))
    for _ in range(40):
        acceptance.add(0, draft(20, 5), 0)
        acceptance.add(1, draft(2, 5), 5)
    assert acceptance.probability(0, draft(20)) < 0.1 < first
    assert acceptance.probability(1, draft(2)) > 0.9
    # A slot of which nothing is known has the share of all.
    assert 0.1 < acceptance.probability(7, draft(2)) < 1.0
    acceptance.open(0)
    before = acceptance.probability(0, draft(20))
    assert before < 0.3
    assert acceptance.probability(0, draft(20, kind=DraftKind.PREDICTION)) == first
    assert acceptance.probability(0, draft(2)) > 0.9


def test_a_match_grows_with_each_token_that_is_accepted() -> None:
    """The first token after a short match is a guess, and those behind it are nearly certain."""
    acceptance = Acceptance()
    for turn in range(80):
        acceptance.add(0, draft(1, 8), 8 if turn % 4 == 0 else 0)
    first, *others = acceptance.probabilities(0, draft(1), 8)
    assert first == acceptance.probability(0, draft(1)) < 0.4
    assert others[-1] > 0.6 * first
    assert [first, *others] == sorted([first, *others], reverse=True)
    assert acceptance.probability(0, draft(8)) > 0.9
    assert acceptance.probabilities(0, draft(8), 2)[0] == acceptance.probability(0, draft(8))


def test_a_draft_model_is_tried_at_first_and_given_up_if_it_is_bad() -> None:
    """A draft takes a third of a step here, as the same model in 4 bits does."""
    acceptance, times = Acceptance(), StepTimes({1: 10.0, 8: 11.0})

    def depth() -> int:
        found = acceptance.probabilities(0, draft(1, kind=DraftKind.MODEL), 8)
        return choose_depth(1, [found], times.seconds, 3.3)

    assert depth() >= 2
    for _ in range(20):
        acceptance.add(0, draft(1, 4, DraftKind.MODEL), 4)
    assert depth() == 8
    for _ in range(60):
        acceptance.add(0, draft(1, 4, DraftKind.MODEL), 0)
    assert depth() == 0


def test_a_slot_that_is_skipped_gets_new_tries() -> None:
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.add(0, draft(20, 1), 0)
    for _ in range(40):
        acceptance.add(1, draft(20, 5), 5)
    low = acceptance.probability(0, draft(20))
    for _ in range(100):
        acceptance.skip(0, draft(20))
    assert acceptance.probability(0, draft(20)) > 2 * low


def test_a_kind_of_draft_that_nobody_tries_any_more_gets_new_tries() -> None:
    acceptance = Acceptance()
    first = acceptance.probability(0, draft(20))
    for _ in range(100):
        acceptance.add(0, draft(20, 1), 0)
    low = acceptance.probability(1, draft(20))
    assert low < 0.4 * first
    for _ in range(800):
        acceptance.skip(0, draft(20))
    assert low < 0.9 * first < acceptance.probability(1, draft(20)) < first


@hypothesis.given(
    strategies.integers(1, 8), CANDIDATES, strategies.floats(0.0, 2.0), strategies.floats(0.0, 0.5)
)
def test_no_other_depth_gives_more_tokens_a_second(
    num_rows: int, candidates: list[list[float]], slope: float, draft_seconds: float
) -> None:
    def seconds(num_tokens: int, num_drafts: int) -> float:
        return 1.0 + slope * (num_tokens + num_drafts)

    def rate(depth: int) -> float:
        counts = tuple(min(len(each), depth) for each in candidates)
        alone = seconds(num_rows, sum(counts))
        fastest = rate_of(num_rows, candidates, counts, seconds)
        return fastest * alone / (alone + depth * draft_seconds)

    chosen = choose_depth(num_rows, candidates, seconds, draft_seconds)
    deepest = max(map(len, candidates), default=0)
    best = max([rate(depth) for depth in range(1, deepest + 1)], default=0.0)
    if chosen:
        assert rate(chosen) == pytest.approx(best)
        assert rate(chosen) > LEAST_GAIN * rate(0) * (1 - 1e-9)
    else:
        assert best <= LEAST_GAIN * rate(0) * (1 + 1e-9)
