"""The order of eviction against a plain model, and what requests may say of it."""

from __future__ import annotations

import itertools
import math

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.eviction import IdlePages
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_check import check_prefix_cache
from trioserve.scheduler.prefix_tree import Node

NUM_PAGES = 14
NAMESPACE = ("",)
Path = tuple[int, ...]
"""The tokens from the start to the end of a page; a page holds one token."""

paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
priorities = st.one_of(st.integers(0, 100), st.sampled_from([DEFAULT_PRIORITY, 0, 50, 50, 100]))
names = st.sampled_from("abc")


@attrs.define
class Entry:
    """A page as the model has it."""

    page: int
    own: int = DEFAULT_PRIORITY
    until: float = math.inf
    order: int = 0
    """Time of the last change of its priority."""
    since: int = 0
    """Time when it became idle, or when its level last changed."""
    num_holders: int = 1


class RetentionMachine(RuleBasedStateMachine):
    """Paths are written, read, held, rated and evicted. The model looks at everything each time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.cache = PrefixCache(self.pool, 1)
        self.table: dict[Path, Entry] = {}
        self.pins: dict[str, tuple[Path, int]] = {}
        self.readers: list[list[Path]] = []
        self.now = 0.0
        self.moments = itertools.count(1)

    # ---- the model

    def level(self, path: Path) -> int:
        below = [each for other, each in self.table.items() if other[: len(path)] == path]
        held = [level for where, level in self.pins.values() if where[: len(path)] == path]
        return max([*(each.own for each in below), *held])

    def levels(self) -> dict[Path, int]:
        return {path: self.level(path) for path in self.table}

    def note(self, changed: Path, before: dict[Path, int]) -> None:
        """Something was said of ``changed``, or changed right below it."""
        raised_to = -1
        for length in range(len(changed), 0, -1):
            path = changed[:length]
            old, new = before[path], self.level(path)
            if new > old:
                raised_to = new
            if new not in (old, raised_to) or (new == old == raised_to) or new > old:
                self.table[path].since = next(self.moments)

    def victim(self) -> Path:
        leaves = [
            path
            for path, entry in self.table.items()
            if not entry.num_holders and not any(other[:-1] == path for other in self.table)
        ]
        return min(leaves, key=lambda path: (self.level(path), self.table[path].since))

    def evict(self) -> None:
        path = self.victim()
        before = self.levels()
        self.cache.evict(1)
        assert not self.pool.is_kept(self.table[path].page), "another page was evicted"
        del self.table[path]
        for name, (where, level) in list(self.pins.items()):
            if where == path:
                del self.pins[name]
                if len(path) > 1:
                    self.pins[name] = path[:-1], level
        self.note(path[:-1], before)

    # ---- what happens

    @rule(path=paths)
    def write(self, path: Path) -> None:
        """Compute what isn't there of ``path``, and go on holding all of it."""
        known = [path[:stop] for stop in range(1, len(path) + 1)]
        there = [each for each in known if each in self.table]
        num_idle = sum(not self.table[each].num_holders for each in there)
        missing = len(known) - len(there)
        if missing > self.pool.num_free + self.pool.num_idle - num_idle:
            return
        self.pool.share([self.table[each].page for each in there])
        for each in there:
            self.table[each].num_holders += 1
        while self.pool.num_free < missing:
            self.evict()
        pages = [self.table[each].page for each in there] + self.pool.allocate(missing)
        nodes = self.cache.path(NAMESPACE, path, len(there))
        before = self.levels()
        self.cache.publish(NAMESPACE, nodes[-1] if nodes else None, path, pages, len(path), plan=0)
        for each, page in zip(known[len(there) :], pages[len(there) :], strict=True):
            self.table[each] = Entry(page)
        self.note(known[len(there) - 1] if there else (), before)
        self.readers.append(known)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        known = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.pool.release([self.table[each].page for each in reversed(known)], epoch=0)
        for each in reversed(known):
            entry = self.table[each]
            entry.num_holders -= 1
            if not entry.num_holders:
                entry.since = next(self.moments)

    @precondition(lambda self: self.table)
    @rule(data=st.data(), priority=priorities, duration=st.sampled_from([math.inf, 0, 1, 2]))
    def rate(self, data: st.DataObject, priority: int, duration: float) -> None:
        path = data.draw(st.sampled_from(sorted(self.table)))
        before = self.levels()
        node = self.cache.path(NAMESPACE, path, len(path))[-1]
        self.cache.priorities.set_own(node, priority, self.now + duration)
        entry = self.table[path]
        entry.own, entry.order = priority, next(self.moments)
        entry.until = math.inf if priority == DEFAULT_PRIORITY else self.now + duration
        self.note(path, before)

    @precondition(lambda self: self.table)
    @rule(data=st.data(), name=names, priority=priorities)
    def hold(self, data: st.DataObject, name: str, priority: int) -> None:
        path = data.draw(st.sampled_from(sorted(self.table)))
        node = self.cache.path(NAMESPACE, path, len(path))[-1]
        self.cache.priorities.pin(name, node, priority)
        former = self.pins.get(name)
        before = self.levels()
        self.pins[f"{name} (new)"] = path, priority
        if former is not None and former[0] == path:
            del self.pins[name]
        self.note(path, before)
        if former is not None and former[0] != path:
            before = self.levels()
            del self.pins[name]
            self.note(former[0], before)
        self.pins[name] = self.pins.pop(f"{name} (new)")

    @rule(name=names)
    def unpin(self, name: str) -> None:
        self.cache.priorities.unpin(name)
        before = self.levels()
        former = self.pins.pop(name, None)
        if former is not None:
            self.note(former[0], before)

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = [path for path, entry in self.table.items() if entry.until <= self.now]
        for path in sorted(due, key=lambda path: (self.table[path].until, self.table[path].order)):
            before = self.levels()
            self.table[path].own, self.table[path].until = DEFAULT_PRIORITY, math.inf
            self.note(path, before)
        if self.cache.priorities.next_expiry <= self.now:
            self.cache.priorities.expire(self.now)
        assert self.cache.priorities.next_expiry > self.now

    @precondition(lambda self: self.pool.num_idle)
    @rule()
    def evict_one(self) -> None:
        self.evict()

    @rule()
    def flush(self) -> None:
        """Flush: pages left are held and can't be matched, so the next paths are new ones."""
        self.cache.flush()
        for known in self.readers:
            self.pool.release([self.table[each].page for each in reversed(known)], epoch=0)
        self.cache.evict(self.pool.num_idle)
        self.table.clear()
        self.pins.clear()
        self.readers.clear()
        assert self.pool.num_free == NUM_PAGES

    @invariant()
    def levels_are_the_models(self) -> None:
        self.pool.check()
        check_prefix_cache(self.cache)
        for path, entry in self.table.items():
            assert self.pool.level(entry.page) == self.level(path)
            assert self.pool.holders(entry.page) == entry.num_holders

    def teardown(self) -> None:
        """Give everything away, in the model's order to the last."""
        for known in self.readers:
            self.pool.release([self.table[each].page for each in reversed(known)], epoch=0)
            for each in reversed(known):
                entry = self.table[each]
                entry.num_holders -= 1
                if not entry.num_holders:
                    entry.since = next(self.moments)
        while self.pool.num_idle:
            self.evict()
        check_prefix_cache(self.cache)
        assert not self.pins
        assert self.pool.num_free == NUM_PAGES


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_idle_pages_go_by_level_and_then_by_age() -> None:
    idle = IdlePages()
    for page, level in ((1, 50), (2, 35), (3, 35), (4, 0), (5, 100)):
        idle.add(page, level)
    idle.move(2, 35)
    idle.move(5, 0)
    idle.move(6, 0)
    idle.discard(7)
    order = []
    while idle:
        order.append(idle.first())
        idle.discard(order[-1])
    assert order == [4, 5, 3, 2, 1]


def test_expiries_stay_few() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 1)
    pages = pool.allocate(1)
    cache.publish(NAMESPACE, None, [1], pages, 1, plan=0)
    (node,) = cache.path(NAMESPACE, [1], 1)
    for number in range(2000):
        cache.priorities.set_own(node, 50, number + 5.0)
        assert len(cache.priorities._expiries) < 100
    cache.priorities.check([node])
    cache.priorities.expire(2000.0)
    assert pool.level(pages[0]) == 50
    cache.priorities.expire(2004.0)
    assert pool.level(pages[0]) == DEFAULT_PRIORITY


def idle_path(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> list[Node]:
    pages = pool.allocate(len(tokens))
    cache.publish(NAMESPACE, None, tokens, pages, len(tokens), plan=0)
    pool.release(reversed(pages), epoch=0)
    return cache.path(NAMESPACE, tokens, len(tokens))


def test_a_page_that_is_raised_to_its_ancestors_level_goes_before_them() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 1)
    nodes = idle_path(pool, cache, [1, 2, 3, 4])
    cache.priorities.set_own(nodes[1], 50)
    cache.priorities.set_own(nodes[3], 50)
    check_prefix_cache(cache)
    order = []
    for _ in range(4):
        order.append(pool.next_idle())
        pool.discard(order[-1])
    assert order == [node.page for node in reversed(nodes)]


def test_a_hold_moves_up_with_evictions() -> None:
    pool = PagePool(5)
    cache = PrefixCache(pool, 1)
    held = idle_path(pool, cache, [1, 2, 3])
    cache.priorities.pin("session", held[-1], 50)
    other = idle_path(pool, cache, [7, 8])
    cache.evict(2)
    assert not any(pool.is_kept(node.page) for node in other)
    cache.evict(1)
    check_prefix_cache(cache)
    assert [pool.level(node.page) for node in held] == [50, 50, DEFAULT_PRIORITY]
    cache.priorities.unpin("session")
    check_prefix_cache(cache)
    assert [pool.level(node.page) for node in held] == [DEFAULT_PRIORITY] * 3
