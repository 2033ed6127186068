"""The prefix cache against a flat table of published prefixes."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trioserve.protocol.wire import from_ints
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_check import check_prefix_cache
from trioserve.scheduler.prefix_tree import Namespace, Node

NUM_PAGES = 12
SIZE = 2

Path = tuple[int, ...]
"""All the tokens from the start to the end of some page."""

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
namespaces = st.sampled_from([("",), ("salt",)])


@attrs.define(eq=False)
class Holder:
    """A sequence as far as the cache is concerned."""

    namespace: Namespace
    tokens: list[int]
    pages: list[int]
    cursor: Node | None
    planned: int
    """Pages given to plans."""
    last_plan: int


class PrefixMachine(RuleBasedStateMachine):
    """Sequences come, publish page by page, and leave; plans are acknowledged one behind.

    The model is a table from (namespace, path) to page, and from page to how long it has been idle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.cache = PrefixCache(self.pool, SIZE)
        self.table: dict[tuple[Namespace, Path], int] = {}
        self.planned_by: dict[int, int] = {}
        """Page to the plan that computes it."""
        self.holders: list[Holder] = []
        self.plan = 1

    def longest(self, namespace: Namespace, known: list[int]) -> list[int]:
        pages: list[int] = []
        for stop in range(SIZE, len(known), SIZE):
            page = self.table.get((namespace, tuple(known[:stop])))
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, count: int) -> None:
        """Evict ``count`` pages; each has to be an idle leaf of the table."""
        for _ in range(count):
            idle = {path for path, page in self.table.items() if self.pool.count_idle([page])}
            before = set(self.table.values())
            self.cache.evict(1)
            gone = {page for page in before if not self.pool.is_kept(page)}
            (path,) = [path for path in idle if self.table[path] in gone]
            assert not any(
                other != path and other[0] == path[0] and other[1][: len(path[1])] == path[1]
                for other in self.table
            ), "a page was evicted from under a longer prefix"
            del self.table[path]

    @rule(namespace=namespaces, known=tokens)
    def enter(self, namespace: Namespace, known: list[int]) -> None:
        match = self.cache.match(namespace, from_ints(known), self.plan)
        expected = self.longest(namespace, known)
        ready = []
        for page in expected:
            if self.planned_by[page] == self.plan:
                break
            ready.append(page)
        assert match.pages == ready
        assert match.pending == (len(ready) < len(expected))
        missing = -(-len(known) // SIZE) - len(ready)
        if missing + self.pool.count_idle(ready) > self.pool.num_free + self.pool.num_idle:
            return
        self.pool.share(ready)
        self.forget(max(0, missing - self.pool.num_free))
        holder = Holder(
            namespace=namespace,
            tokens=known,
            pages=ready + self.pool.allocate(missing),
            cursor=match.nodes[-1] if match.nodes else None,
            planned=len(ready),
            last_plan=self.plan,
        )
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 3))
    def compute(self, data: st.DataObject, count: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder.last_plan = self.plan
        holder.planned = min(holder.planned + count, len(holder.tokens) // SIZE)
        holder.cursor = self.cache.publish(
            holder.namespace, holder.cursor, holder.tokens, holder.pages, holder.planned, self.plan
        )
        # The model's own way: publish until another sequence's page stands there.
        for index in range(holder.planned):
            key = (holder.namespace, tuple(holder.tokens[: (index + 1) * SIZE]))
            if self.table.setdefault(key, holder.pages[index]) != holder.pages[index]:
                break
            self.planned_by.setdefault(holder.pages[index], self.plan)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        computed = data.draw(st.integers(0, holder.planned), label="acknowledged pages")
        released = self.cache.leave(
            holder.namespace, holder.cursor, holder.tokens, holder.pages, computed
        )
        for index in range(computed):
            key = (holder.namespace, tuple(holder.tokens[: (index + 1) * SIZE]))
            self.planned_by.setdefault(self.table.setdefault(key, holder.pages[index]), 0)
        self.pool.release(released, holder.last_plan)

    @rule()
    def next_plan(self) -> None:
        self.pool.acknowledge(self.plan - 1)
        self.plan += 1

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.integers(0, self.pool.num_idle)))

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        check_prefix_cache(self.cache)
        published = set(self.table.values())
        assert len(published) == len(self.table)
        assert published == {page for page in range(NUM_PAGES) if self.pool.is_kept(page)}
        for page in list(self.planned_by):
            if page not in published:
                del self.planned_by[page]


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def publish(cache: PrefixCache, known: list[int], plan: int = 0) -> list[int]:
    """Enter a sequence, compute everything and leave; return its pages."""
    pages = cache.pool.allocate(len(known) // SIZE)
    cursor = cache.publish(("",), None, known, pages, len(pages), plan)
    cache.pool.release(cache.leave(("",), cursor, known, pages, len(pages)), plan)
    return pages


def test_the_last_token_is_never_matched() -> None:
    cache = PrefixCache(PagePool(4), SIZE)
    pages = publish(cache, [1, 2, 3, 4])
    assert cache.match(("",), from_ints([1, 2, 3, 4]), 1).pages == pages[:1]
    assert cache.match(("",), from_ints([1, 2, 3, 4, 5]), 1).pages == pages
    assert cache.match(("",), from_ints([1, 2]), 1).pages == []
    assert cache.match(("other",), from_ints([1, 2, 3]), 1).pages == []


def test_the_same_tokens_after_others_are_another_page() -> None:
    cache = PrefixCache(PagePool(4), SIZE)
    publish(cache, [1, 1, 7, 7])
    other = publish(cache, [2, 2, 7, 7])
    assert cache.match(("",), from_ints([2, 2, 7, 7, 0]), 1).pages == other


def test_least_recently_used_goes_first_and_leaves_before_their_parents() -> None:
    cache = PrefixCache(PagePool(6), SIZE)
    old = publish(cache, [1, 1, 2, 2])
    young = publish(cache, [3, 3, 4, 4])
    # The old one is used again, in part.
    match = cache.match(("",), from_ints([1, 1, 9]), 1)
    cache.pool.share(match.pages)
    cache.pool.release(match.pages, 0)
    gone = [cache.pool.is_kept(page) for page in old + young]
    for expected in (old[1], young[1], young[0], old[0]):
        cache.evict(1)
        left = [cache.pool.is_kept(page) for page in old + young]
        assert [page for page, a, b in zip(old + young, gone, left, strict=True) if a != b] == [
            expected
        ]
        gone = left


def test_a_page_is_pending_in_the_plan_that_computes_it() -> None:
    cache = PrefixCache(PagePool(4), SIZE)
    pages = cache.pool.allocate(2)
    cache.publish(("",), None, [1, 1, 2, 2], pages, 2, plan=7)
    match = cache.match(("",), from_ints([1, 1, 2, 2, 3]), 7)
    assert (match.pages, match.pending) == ([], True)
    match = cache.match(("",), from_ints([1, 1, 2, 2, 3]), 8)
    assert (match.pages, match.pending) == (pages, False)


def test_a_copy_stays_private_until_its_sequence_leaves() -> None:
    cache = PrefixCache(PagePool(6), SIZE)
    known = [1, 1, 2, 2, 3, 3]
    first = publish(cache, known[:2])
    pages = cache.pool.allocate(3)
    cursor = cache.publish(("",), None, known, pages, 3, plan=1)
    assert cursor is None
    assert not any(map(cache.pool.is_kept, pages))
    released = cache.leave(("",), cursor, known, pages, 3)
    assert released == [pages[2], pages[1], pages[0], first[0]]
    cache.pool.release(released, 0)
    assert cache.match(("",), from_ints([*known, 0]), 2).pages == [first[0], pages[1], pages[2]]
    assert cache.pool.num_free == 3
    check_prefix_cache(cache)
