"""The page pool and the slot table, each against a model that is slower and simpler."""

from __future__ import annotations

import collections

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.slots import SlotAllocator

NUM_PAGES = 6


@attrs.define
class ModelPage:
    holders: int = 0
    epoch: int = 0
    kept: bool = False


class PoolMachine(RuleBasedStateMachine):
    """Each page by itself, in plain fields; idle pages in a list by when they became so."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.model = [ModelPage() for _ in range(NUM_PAGES)]
        self.released: list[int] = []
        """Pages without a holder that aren't free, by the time of their release."""
        self.idle: list[int] = []
        self.acknowledged = 0
        self.epoch = 0

    def settle(self) -> None:
        for page in list(self.released):
            if self.model[page].epoch <= self.acknowledged:
                self.released.remove(page)
                if self.model[page].kept:
                    self.idle.append(page)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        for page in self.pool.allocate(count):
            assert self.model[page].holders == 0
            assert page not in self.released
            assert page not in self.idle
            self.model[page] = ModelPage(holders=1)

    @precondition(lambda self: any(page.holders for page in self.model))
    @rule(data=st.data(), ahead=st.integers(-1, 2))
    def release(self, data: st.DataObject, ahead: int) -> None:
        held = [number for number, page in enumerate(self.model) if page.holders]
        page = data.draw(st.sampled_from(held))
        epoch = max(0, self.acknowledged + ahead)
        self.pool.release([page], epoch)
        self.model[page].holders -= 1
        self.model[page].epoch = max(self.model[page].epoch, epoch)
        if not self.model[page].holders:
            self.released.append(page)
            self.settle()

    @precondition(lambda self: any(page.kept for page in self.model))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        kept = [number for number, page in enumerate(self.model) if page.kept]
        page = data.draw(st.sampled_from(kept))
        was_idle = page in self.idle
        assert self.pool.count_idle([page]) == was_idle
        self.pool.share([page])
        self.model[page].holders += 1
        if was_idle:
            self.idle.remove(page)
        elif page in self.released:
            self.released.remove(page)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        pages = [number for number, page in enumerate(self.model) if page.holders and not page.kept]
        if pages:
            page = data.draw(st.sampled_from(pages))
            self.pool.keep(page)
            self.model[page].kept = True

    @precondition(lambda self: self.pool.num_idle)
    @rule()
    def evict(self) -> None:
        page = self.pool.next_idle()
        self.pool.discard(page)
        assert page == self.idle.pop(0), "not the page that was idle longest"
        self.model[page].kept = False

    @rule(step=st.integers(1, 2))
    def acknowledge(self, step: int) -> None:
        self.acknowledged += step
        self.pool.acknowledge(self.acknowledged)
        self.settle()

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        held = sum(page.holders > 0 for page in self.model)
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_retiring == len(self.released)
        assert self.pool.num_held == held + len(self.released)
        assert self.pool.num_free == NUM_PAGES - held - len(self.released) - len(self.idle)
        assert [self.pool.holders(page) for page in range(NUM_PAGES)] == [
            page.holders for page in self.model
        ]
        assert [self.pool.is_kept(page) for page in range(NUM_PAGES)] == [
            page.kept for page in self.model
        ]


class SlotMachine(RuleBasedStateMachine):
    """Slots opened and closed as by a scheduler with plans in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotAllocator(3)
        self.open: dict[int, int] = {}
        self.busy_until: dict[int, int] = {}
        self.unclosed: list[int] = []
        self.generations: dict[int, int] = collections.defaultdict(int)
        self.acknowledged = 0

    @precondition(lambda self: self.table.num_free)
    @rule()
    def open_one(self) -> None:
        slot, generation = self.table.open()
        assert slot not in self.open
        assert self.busy_until.get(slot, 0) <= self.acknowledged
        assert generation == self.generations[slot] + 1
        self.open[slot] = self.generations[slot] = generation

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ahead=st.integers(-1, 2))
    def close_one(self, data: st.DataObject, ahead: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[slot]
        self.busy_until[slot] = max(0, self.acknowledged + ahead)
        self.table.close(slot, self.busy_until[slot])
        self.unclosed.append(slot)

    @rule()
    def acknowledge(self) -> None:
        self.acknowledged += 1
        self.table.acknowledge(self.acknowledged)

    @rule()
    def make_plan(self) -> None:
        assert self.table.take_unclosed() == self.unclosed
        self.unclosed = []

    @invariant()
    def agree(self) -> None:
        retiring = sum(until > self.acknowledged for until in self.busy_until.values())
        retiring -= sum(self.busy_until.get(slot, 0) > self.acknowledged for slot in self.open)
        assert self.table.num_retiring == retiring
        assert self.table.num_free == 3 - len(self.open) - retiring


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_misuse_asserts() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 pages needed, 1 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="shared but not kept"):
        pool.share([page])
    pool.keep(page)
    with pytest.raises(AssertionError, match="kept twice"):
        pool.keep(page)
    pool.release([page], 0)
    with pytest.raises(AssertionError, match="released but not held"):
        pool.release([page], 0)


def test_a_shared_page_outlives_the_holder_that_retired_it() -> None:
    """Release it with plan 5 in flight, find it again, and release it once more with plan 3."""
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.keep(pages[0])
    pool.release(pages, 5)
    pool.share(pages)
    pool.release(pages, 3)
    pool.acknowledge(4)
    assert (pool.num_idle, pool.num_retiring) == (0, 1)
    pool.acknowledge(5)
    assert (pool.num_idle, pool.num_retiring) == (1, 0)
