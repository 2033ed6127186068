"""The choices, as properties that hold whatever they are given."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.scheduler import policy


@attrs.define(eq=False)
class Running:
    """A sequence that needs ``prompt`` tokens of prefill and then decodes ``output`` tokens."""

    remaining: int
    output: int = 1000

    @property
    def may_run(self) -> bool:
        return self.output > 0

    def advance(self, count: int) -> None:
        self.remaining -= count
        if self.remaining == 0:
            self.output -= 1
            self.remaining = 1


lengths = st.lists(st.integers(1, 40), max_size=12)


def share_out(running: list[Running], budget: int, prompts: int | None = None) -> policy.Share:
    remaining = np.array([each.remaining for each in running], dtype=np.int64)
    may_run = np.array([each.may_run for each in running], dtype=np.bool_)
    return policy.Share.divide(remaining, may_run, budget, budget if prompts is None else prompts)


@given(lengths, st.integers(12, 60))
def test_the_budget_is_kept_and_no_decode_waits(remaining: list[int], budget: int) -> None:
    running = [Running(length) for length in remaining]
    share = share_out(running, budget)
    assert share.decodes.tolist() == [i for i, each in enumerate(running) if each.remaining == 1]
    planned = len(share.decodes) + sum(count for _, count in share.chunks)
    assert planned + share.left == budget
    assert share.left >= 0
    assert all(0 < count <= remaining[place] for place, count in share.chunks)


@given(lengths, st.integers(12, 60))
def test_prefill_is_in_order_and_takes_all_it_can(remaining: list[int], budget: int) -> None:
    running = [Running(length) for length in remaining]
    share = share_out(running, budget)
    prefills = [place for place, each in enumerate(running) if each.remaining > 1]
    assert [place for place, _ in share.chunks] == prefills[: len(share.chunks)]
    assert all(count == remaining[place] for place, count in share.chunks[:-1])
    if share.left:
        assert [count for _, count in share.chunks] == [remaining[place] for place in prefills]


@given(lengths, st.integers(12, 60), st.integers(1, 60))
def test_prompts_keep_to_their_part_where_somebody_decodes(
    remaining: list[int], budget: int, prompts: int
) -> None:
    share = share_out([Running(length) for length in remaining], budget, prompts)
    in_chunks = sum(count for _, count in share.chunks)
    if len(share.decodes):
        waiting = len(remaining) - len(share.decodes)
        assert in_chunks + share.left == min(budget - len(share.decodes), max(prompts, waiting))
    else:
        assert in_chunks + share.left == budget


@given(lengths.filter(bool), st.integers(12, 20), st.integers(1, 20))
def test_everybody_ends(remaining: list[int], budget: int, prompts: int) -> None:
    """Give the first sequence in prefill at least a token in every plan, so that none starves."""
    running = [Running(length, output=5) for length in remaining]
    for _ in range(sum(remaining) + 5 * len(running)):
        share = share_out(running, budget, prompts)
        for place in share.decodes.tolist():
            running[place].advance(1)
        for place, count in share.chunks:
            running[place].advance(count)
        running = [each for each in running if each.may_run]
    assert not running


def test_who_has_nothing_left_to_sample_gets_nothing() -> None:
    share = share_out([Running(1, output=0), Running(1)], 4)
    assert (len(share.decodes), share.left) == (1, 3)


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
    ordered = list(policy.admission_order("lpm", line, lambda each: each[1]))
    window = policy.LPM_WINDOW
    assert ordered[:window] == sorted(line[:window], key=lambda each: (-each[1], each[0]))
    assert ordered[window:] == line[window:]


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_other_policies_keep_the_line(name: str) -> None:
    assert list(policy.admission_order(name, [3, 1, 2], lambda each: each)) == [3, 1, 2]


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
