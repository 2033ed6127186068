"""The index over all workers' prefixes against the caches themselves."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trioserve.protocol.wire import from_ints
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_index import ComingPrompt, PrefixIndex, WorkerPages
from trioserve.scheduler.prefix_runs import WIDE
from trioserve.scheduler.prefix_tree import Namespace, Node

SIZE = 2
NUM_WORKERS = 3
DEVICE, HOST = 10, 6
prompts = st.lists(st.integers(0, 1), max_size=13)
namespaces = st.sampled_from([("",), ("salt",)])
workers = st.integers(0, NUM_WORKERS - 1)


def find(
    index: PrefixIndex, namespace: Namespace, tokens: list[int], holders: int
) -> tuple[list[int], list[int]]:
    """Return the pages that each holder has, and will have."""
    found = np.zeros((2, holders))
    index.find(namespace, SIZE, from_ints(tokens), *found)
    held, coming = (found / SIZE).astype(int).tolist()
    return held, coming


@attrs.define(eq=False)
class Running:
    """A sequence that holds its pages."""

    worker: int
    namespace: Namespace
    tokens: list[int]
    pages: list[int]
    cursor: Node | None


@attrs.define(eq=False)
class Coming:
    """A prompt that isn't computed yet."""

    worker: int
    namespace: Namespace
    tokens: list[int]
    entry: ComingPrompt | None

    def pages_of(self, namespace: Namespace, tokens: list[int]) -> int:
        """Return the pages that a prompt will find of it."""
        most = min(len(self.tokens) // SIZE, (len(tokens) - 1) // SIZE)
        if namespace != self.namespace:
            return 0
        same = [self.tokens[: n * SIZE] == tokens[: n * SIZE] for n in range(most + 1)]
        return max((n for n, is_same in enumerate(same) if is_same), default=0)


class IndexMachine(RuleBasedStateMachine):
    """Prompts come, are computed and evicted on workers that join and leave.

    Holder 2 * n has all pages of worker n, and the next one those on its device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.coming: list[Coming] = []
        self.running: list[Running] = []
        self.caches: list[PrefixCache] = []
        for worker in range(NUM_WORKERS):
            # The last worker has no memory on the host.
            host = HOST if worker < NUM_WORKERS - 1 else 0
            self.caches.append(PrefixCache(PagePool(DEVICE, host), SIZE))
            self.join(worker)

    def join(self, worker: int) -> None:
        cache = self.caches[worker]
        on_device = 2 * worker + 1 if cache.pool.num_host_pages else None
        cache.join(WorkerPages(self.index, 2 * worker, on_device))

    @rule(worker=workers, namespace=namespaces, tokens=prompts)
    def compute(self, worker: int, namespace: Namespace, tokens: list[int]) -> None:
        cache, count = self.caches[worker], len(tokens) // SIZE
        match = cache.match(namespace, from_ints(tokens), 0, len(tokens))
        shared = match.pages
        if count - len(shared) + cache.pool.count_idle(shared) > cache.pool.num_idle + (
            cache.pool.num_free
        ):
            return
        cache.pool.share(shared)
        cache.pin(match.on_host)
        cache.evict(max(count - len(shared) - cache.pool.num_free, 0))
        pages = shared + cache.load(match.on_host)
        pages += cache.pool.allocate(count - len(pages))
        cursor = match.nodes[-1] if match.nodes else None
        cursor = cache.publish(namespace, cursor, tokens, pages, count, 0)
        self.running.append(Running(worker, namespace, tokens, pages, cursor))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        each = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        cache, count = self.caches[each.worker], len(each.pages)
        pages = cache.leave(each.namespace, each.cursor, each.tokens, each.pages, count)
        cache.pool.release(pages, 0)

    @rule(worker=workers, data=st.data())
    def evict(self, worker: int, data: st.DataObject) -> None:
        cache = self.caches[worker]
        cache.evict(data.draw(st.integers(0, cache.pool.num_idle)))

    @rule(worker=workers)
    def flush(self, worker: int) -> None:
        cache = self.caches[worker]
        cache.flush()
        for each in self.running:
            if each.worker == worker:
                each.namespace = cache.flushed(each.namespace)

    @rule(worker=workers)
    def leave_and_join(self, worker: int) -> None:
        self.caches[worker].leave_index()
        self.join(worker)

    @rule(worker=workers, namespace=namespaces, tokens=prompts, is_known=st.booleans())
    def place(self, worker: int, namespace: Namespace, tokens: list[int], is_known: bool) -> None:
        path = None
        if is_known:
            held, coming = np.zeros((2, 2 * NUM_WORKERS))
            path = self.index.find(namespace, SIZE, from_ints(tokens), held, coming)
        entry = self.index.add_coming(namespace, SIZE, from_ints(tokens), 2 * worker, path)
        self.coming.append(Coming(worker, namespace, tokens, entry))

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ended = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        if ended.entry is not None:
            ended.entry.end()

    @rule(namespace=namespaces, tokens=prompts)
    def find(self, namespace: Namespace, tokens: list[int]) -> None:
        held, coming = find(self.index, namespace, tokens, 2 * NUM_WORKERS)
        for worker, cache in enumerate(self.caches):
            match = cache.match(namespace, from_ints(tokens), 1)
            assert held[2 * worker] == len(match.nodes)
            if cache.pool.num_host_pages:
                assert held[2 * worker + 1] == len(match.pages)
            expected = [
                each.pages_of(namespace, tokens) for each in self.coming if each.worker == worker
            ]
            assert coming[2 * worker] == max(expected, default=0)

    @invariant()
    def is_empty_without_pages(self) -> None:
        left = any(cache.num_nodes for cache in self.caches)
        if not left and not any(each.entry for each in self.coming):
            assert self.index.is_empty


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def test_a_prefix_that_many_workers_have() -> None:
    index = PrefixIndex()
    count = 3 * WIDE
    tokens = list(range(100, 130))
    caches = [PrefixCache(PagePool(16), SIZE) for _ in range(count)]
    for number, cache in enumerate(caches):
        cache.join(WorkerPages(index, number))
    for number, cache in enumerate(caches):
        pages = cache.pool.allocate(number % 5)
        cache.publish(("",), None, tokens, pages, len(pages), 0)
    for _ in range(2):
        held, _coming = find(index, ("",), tokens, count)
        assert held == [number % 5 for number in range(count)]
    held, _coming = find(index, ("",), [*tokens[:5], 1], count)
    assert held == [min(number % 5, 2) for number in range(count)]
    more = caches[0].pool.allocate(1)
    caches[0].publish(("",), None, tokens, more, 1, 0)
    held, _coming = find(index, ("",), tokens, count)
    assert held[0] == 1


def test_runs_are_split_where_prompts_part() -> None:
    index = PrefixIndex()
    entries = [
        index.add_coming(("",), SIZE, from_ints(tokens), holder)
        for holder, tokens in enumerate(([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [1, 1]))
    ]
    _held, coming = find(index, ("",), [1, 1, 2, 2, 3, 3, 3], 3)
    assert coming == [3, 2, 1]
    for one, two in itertools.pairwise(entries):
        assert one is not None
        assert two is not None
        one.end()
        _held, coming = find(index, ("",), [1, 1, 2, 2, 4, 4, 4], 3)
        assert coming in ([0, 3, 1], [0, 0, 1])
    assert two is not None
    two.end()
    assert index.is_empty
