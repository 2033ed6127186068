"""The choices, as properties that hold whatever they are given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.scheduler import policy


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans())))
def test_a_sequence_that_may_run_decodes_or_is_in_prefill(running: list[tuple[int, bool]]) -> None:
    remaining = np.array([left for left, _ in running], dtype=np.int64)
    may_run = np.array([may for _, may in running], dtype=np.bool_)
    decodes, prefills = policy.split_running(remaining, may_run)
    assert decodes.tolist() == [i for i, (left, may) in enumerate(running) if may and left == 1]
    assert prefills.tolist() == [i for i, (left, may) in enumerate(running) if may and left > 1]


ratios = st.integers(0, 4).map(float)
priorities = st.integers(0, 1)
in_prefill = st.lists(st.tuples(priorities, ratios), max_size=8)
in_queue = st.lists(st.tuples(ratios, st.sampled_from(["a", "b", None])), max_size=8)


def candidates(
    running: list[tuple[int, float]], waiting: list[tuple[float, str | None]]
) -> tuple[list[policy.Candidate[str]], list[policy.Candidate[str]]]:
    """Return candidates that are named by their queue and place."""
    return (
        [policy.Candidate(f"r{i}", *each) for i, each in enumerate(running)],
        [policy.Candidate(f"w{i}", 0, ratio, own) for i, (ratio, own) in enumerate(waiting)],
    )


@given(in_prefill, in_queue)
def test_prompts_are_merged_and_tenants_keep_their_turns(
    running: list[tuple[int, float]], waiting: list[tuple[float, str | None]]
) -> None:
    first, queue = candidates(running, waiting)
    order = policy.prompt_order(first, queue)
    assert sorted(order) == sorted(each.item for each in (*first, *queue))
    by_name = {each.item: each for each in (*first, *queue)}
    ordered = [by_name[name] for name in order if name.startswith("r")]
    assert ordered == sorted(first, key=lambda each: each.rank)
    turns = [by_name[name] for name in order if name.startswith("w")]
    assert [each.tenant for each in turns] == [each.tenant for each in queue]
    for tenant in ("a", "b"):
        own = [each for each in turns if each.tenant == tenant]
        mine = [each for each in queue if each.tenant == tenant]
        assert own == sorted(mine, key=lambda each: each.rank)
    assert [each for each in turns if each.tenant is None] == [
        each for each in queue if each.tenant is None
    ]


@given(in_prefill, in_queue)
def test_a_sequence_in_prefill_goes_on_before_a_waiting_one_that_ranks_lower_or_equal(
    running: list[tuple[int, float]], waiting: list[tuple[float, str | None]]
) -> None:
    first, queue = candidates(running, waiting)
    order = policy.prompt_order(first, queue)
    rank = {each.item: each.rank for each in (*first, *queue)}
    for place, name in enumerate(order):
        if name.startswith("w"):
            later = [other for other in order[place:] if other.startswith("r")]
            assert all(rank[other] > rank[name] for other in later)


def test_lines() -> None:
    early_low = policy.queue_order("fcfs", priority=5, arrival=1, index=0)
    late_high = policy.queue_order("fcfs", priority=0, arrival=2, index=0)
    assert early_low < late_high
    early_low = policy.queue_order("priority", priority=5, arrival=1, index=0)
    late_high = policy.queue_order("priority", priority=0, arrival=2, index=0)
    assert late_high < early_low
    first, second = (policy.queue_order("lpm", priority=0, arrival=1, index=i) for i in range(2))
    assert first < second


@given(st.lists(st.integers(0, 5), max_size=300))
def test_longest_prefix_first_and_arrival_among_equals(cached: list[int]) -> None:
    line = list(enumerate(cached))
    ordered = list(policy.admission_order("lpm", line, lambda each: each[1], lambda _: False))
    window = policy.LPM_WINDOW
    assert ordered[:window] == sorted(line[:window], key=lambda each: (-each[1], each[0]))
    assert ordered[window:] == line[window:]


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_other_policies_keep_the_line(name: str) -> None:
    def number(each: int) -> int:
        return each

    ordered = policy.admission_order(name, [3, 1, 2], number, lambda each: each == 2)
    assert list(ordered) == [3, 1, 2]


def test_sequences_that_have_run_before_keep_their_places_at_the_front() -> None:
    ordered = policy.admission_order("lpm", [0, 1, 5, 9], lambda each: each, lambda each: each < 2)
    assert list(ordered) == [0, 1, 9, 5]


@given(
    pool=st.integers(1, 40),
    sequences=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=20),
    data=st.data(),
)
def test_guaranteed_capacity_is_never_exceeded(
    pool: int, sequences: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Let every admitted sequence grow to its end, in any order of ends."""
    held: list[int] = []
    growth: list[int] = []
    for need, may_grow in sequences:
        if policy.may_admit(
            "guaranteed_no_evict",
            available=pool - sum(held),
            retiring=0,
            need=need,
            growth=may_grow,
            running_growth=np.array(growth, dtype=np.int64),
        ):
            held.append(need)
            growth.append(may_grow)
        growing = [index for index, pages in enumerate(growth) if pages]
        if growing and data.draw(st.booleans()):
            index = data.draw(st.sampled_from(growing))
            held[index] += 1
            growth[index] -= 1
        assert sum(held) + sum(growth) <= pool


@given(available=st.integers(0, 20), need=st.integers(1, 20), running=st.integers(0, 10))
def test_utilization_keeps_a_page_in_hand_for_each(available: int, need: int, running: int) -> None:
    admitted = policy.may_admit(
        "max_utilization",
        available=available,
        retiring=5,
        need=need,
        growth=100,
        running_growth=np.full(running, 3),
    )
    assert admitted == (available - need >= running)


def test_pages_that_retire_can_be_promised_but_not_given() -> None:
    def may_admit(**pages: int) -> bool:
        return policy.may_admit("guaranteed_no_evict", running_growth=np.array([2]), **pages)

    assert may_admit(available=3, retiring=3, need=3, growth=1)
    assert not may_admit(available=3, retiring=3, need=3, growth=2)
    assert not may_admit(available=3, retiring=3, need=4, growth=0)


def test_the_last_in_line_is_the_victim() -> None:
    assert policy.choose_victim(["first", "second", "third"]) == "third"
