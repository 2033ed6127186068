"""Pages that go to the host's memory and come back: bookkeeping, and what the worker is told."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.scheduling import ABORT, Bench, reference, worker
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.requests.request import Sequence, State
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_check import check_prefix_cache
from trioserve.scheduler.prefix_tree import Namespace, Node
from trioserve.testing import hashed_token

NUM_PAGES, NUM_PLACES = 8, 5
NAMESPACES: tuple[Namespace, ...] = (("",), ("salt",))
Path = tuple[int, ...]
"""The tokens from the start to the end of a page; a page holds one token."""


@attrs.define(eq=False)
class Reader:
    """A sequence that holds a path of which all pages are computed."""

    namespace: Namespace
    path: Path
    pages: list[int]
    cursor: Node | None
    computes: int
    """Number of its first pages that the cache may take."""


class OffloadMachine(RuleBasedStateMachine):
    """Paths are read and written in a memory that is copied about as the cache says.

    What a node stands for must be where it says, at any time, and the host loses what is worth
    least, and of that what has been there longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, NUM_PLACES)
        self.cache = PrefixCache(self.pool, 1)
        self.memory: dict[int, tuple[Namespace, Path]] = {}
        self.readers: list[Reader] = []

    def copy(self) -> None:
        for source, destination in self.cache.take_copies():
            self.memory[destination] = self.memory.pop(source)

    def nodes(self) -> dict[tuple[Namespace, Path], Node]:
        found: dict[tuple[Namespace, Path], Node] = {}
        pending: list[tuple[Namespace, Path, Node]] = []
        for namespace, root in self.cache._roots.items():
            pending.append((namespace, (), root))
        while pending:
            namespace, path, node = pending.pop()
            for child in node.children.values():
                below = (*path, *wire.ints(child.tokens).tolist())
                found[namespace, below] = child
                pending.append((namespace, below, child))
        return found

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        path=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple),
        computes=st.integers(0, 5),
        most=st.integers(0, 5),
    )
    def enter(self, namespace: Namespace, path: Path, computes: int, most: int) -> None:
        """Come in, sharing what may be; pages of one's own stay private beyond ``computes``."""
        match = self.cache.match(namespace, wire.from_ints([*path, -1]), plan=-1, most=most)
        missing = len(path) - len(match.pages)
        if missing + self.pool.count_idle(match.pages) > self.pool.num_free + self.pool.num_idle:
            return
        self.pool.share(match.pages)
        self.cache.pin(match.on_host)
        pages = match.pages
        self.evict(max(0, missing - self.pool.num_free))
        pages += self.cache.load(match.on_host)
        self.copy()
        own = self.pool.allocate(len(path) - len(pages))
        for number, page in enumerate(own, len(pages) + 1):
            self.memory[page] = namespace, path[:number]
        cursor = match.nodes[-1] if match.nodes else None
        computes = max(min(computes, len(path)), len(match.nodes))
        cursor = self.cache.publish(namespace, cursor, path, pages + own, computes, plan=0)
        self.readers.append(Reader(namespace, path, pages + own, cursor, computes))

    def evict(self, count: int) -> None:
        for _ in range(count):
            before = {node.page for node in self.nodes().values()}
            stored = [page for page in before if self.pool.is_on_host(page)]
            levels = {page: self.pool.level(page) for page in stored}
            victim = self.pool.next_idle()
            level = self.pool.level(victim)
            offloaded, lost = self.cache.evict(1)
            after = {node.page for node in self.nodes().values()}
            assert victim not in after
            if len(stored) < NUM_PLACES:
                assert (offloaded, lost) == (1, 0)
            else:
                # One had to go: of those that aren't about to be read, one of the lowest level.
                pinned = self.pool.host._pinned
                lowest = min((levels[page] for page in stored if page not in pinned), default=101)
                assert (offloaded, lost) == (int(lowest <= level), 1)
                assert all(levels[page] == lowest for page in set(stored) - after)
            self.copy()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Everything that has been computed is published, private pages too."""
        reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        released = self.cache.leave(
            reader.namespace, reader.cursor, reader.path, reader.pages, len(reader.path)
        )
        self.pool.release(released, epoch=0)

    @precondition(lambda self: self.nodes())
    @rule(data=st.data(), priority=st.sampled_from([0, 10, 35, 35, 80]))
    def rate(self, data: st.DataObject, priority: int) -> None:
        nodes = self.nodes()
        where = data.draw(st.sampled_from(sorted(nodes, key=str)))
        self.cache.priorities.set_own(nodes[where], priority)

    @precondition(lambda self: self.nodes())
    @rule(data=st.data(), pins=st.booleans())
    def hold(self, data: st.DataObject, pins: bool) -> None:
        nodes = self.nodes()
        where = data.draw(st.sampled_from(sorted(nodes, key=str)))
        if pins:
            self.cache.priorities.pin("session", nodes[where], 60)
        else:
            self.cache.priorities.unpin("session")

    @rule()
    def flush(self) -> None:
        held = {page for reader in self.readers for page in reader.pages}
        self.cache.flush()
        assert self.pool.num_idle == self.pool.host.num_stored == 0
        assert self.pool.num_free == NUM_PAGES - len(held)
        for reader in self.readers:
            reader.namespace = self.cache.flushed(reader.namespace)

    @precondition(lambda self: not self.readers)
    @rule(namespace=st.sampled_from(NAMESPACES))
    def drop(self, namespace: Namespace) -> None:
        self.cache.drop(lambda each: each == namespace)
        assert not any(each == namespace for each, _ in self.nodes())

    @invariant()
    def sound(self) -> None:
        self.pool.check()
        check_prefix_cache(self.cache)
        for (namespace, path), node in self.nodes().items():
            there, what = self.memory[node.page]
            assert (there[:1], what) == (namespace[:1], path), "something else is there"


TestOffload = OffloadMachine.TestCase
TestOffload.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def bench_of(*, num_pages: int = 20, num_host_pages: int = 40, **options: Any) -> Bench:
    fake = worker(
        num_pages=num_pages, num_host_pages=num_host_pages, page_size=4, token=hashed_token(256)
    )
    return Bench.make(fake, **options)


def prompt(number: int, length: int = 17) -> list[int]:
    return [number * 50 + index for index in range(length)]


def ask(bench: Bench, tokens: list[int], **options: Any) -> Sequence:
    sequence = bench.submit(tokens, **{"max_tokens": 3, **options})
    bench.drain()
    assert sequence.output_ids == reference(bench.worker, sequence)
    return sequence


def test_what_was_pushed_out_is_found_again() -> None:
    bench = bench_of()
    for number in range(6):  # each leaves 4 full pages, where 20 fit
        ask(bench, prompt(number))
    counters = bench.core.counters
    assert (counters.pages_offloaded, counters.pages_evicted) == (5, 0)
    again = ask(bench, prompt(0))
    assert again.request.num_cached_tokens == 16
    assert counters.pages_onloaded == 4
    assert bench.core.statistics().host_pages_total == 40
    assert bench.core.statistics().host_pages_cached == counters.pages_offloaded - 4


def test_without_a_place_on_the_host_it_is_lost_as_ever() -> None:
    bench = bench_of(num_host_pages=0)
    for number in range(6):
        ask(bench, prompt(number))
    assert bench.core.counters.pages_offloaded == 0
    assert bench.core.counters.pages_evicted == 5
    assert ask(bench, prompt(0)).request.num_cached_tokens < 16
    assert not any(plan.copies for plan in bench.plans)


def test_copies_are_part_of_the_plan_that_needs_them() -> None:
    bench = bench_of()
    for number in range(6):
        ask(bench, prompt(number))
    before = len(bench.plans)
    ask(bench, prompt(0))
    [opening] = [plan for plan in bench.plans[before:] if plan.opened]
    copies = wire.ints(opening.copies).reshape(-1, 2).tolist()
    loaded = [to for come, to in copies if come >= 20]
    assert loaded == wire.ints(opening.opened[0].pages).tolist()[:4]
    assert all((come >= 20) != (to >= 20) for come, to in copies)


def test_who_was_preempted_comes_back_without_computing_again() -> None:
    """With no room on the host, preemption costs all that had been computed."""
    computed: list[int] = []
    for num_host_pages in (0, 100):
        bench = bench_of(num_pages=12, num_host_pages=num_host_pages)
        sequences = [bench.submit(prompt(number, 9), max_tokens=20) for number in range(4)]
        bench.drain()
        assert bench.core.counters.num_preemptions > 0
        for sequence in sequences:
            assert sequence.output_ids == reference(bench.worker, sequence)
        computed.append(bench.core.counters.num_tokens_computed)
    assert computed[1] < computed[0]
    # Of a resumed sequence, only what filled no page is computed again, at most a page each time.
    wanted = sum(len(each.request.prompt_ids) + 20 - 1 for each in sequences)
    assert computed[1] <= wanted + 4 * bench.core.counters.num_preemptions


def test_a_lost_worker_takes_the_hosts_pages_with_it() -> None:
    bench = bench_of()
    for number in range(6):
        ask(bench, prompt(number))
    assert bench.core.statistics().host_pages_cached > 0
    bench.core.recovery.on_worker_lost()
    bench.core.recovery.judge(WorkerLost("gone", from_outside=True))
    bench.worker = worker(num_pages=20, num_host_pages=7, page_size=4, token=hashed_token(256))
    bench.core.recovery.restart(
        attrs.evolve(bench.core.limits, num_host_pages=bench.worker.num_host_pages)
    )
    assert bench.core.statistics().host_pages_cached == 0
    assert bench.core.statistics().host_pages_total == 7
    assert ask(bench, prompt(0)).request.num_cached_tokens == 0


def test_flushing_empties_the_host_too() -> None:
    bench = bench_of()
    for number in range(6):
        ask(bench, prompt(number))
    stored = bench.core.statistics().host_pages_cached
    cached = bench.core.statistics().pages_cached
    assert stored > 0
    assert bench.core.memory.flush(bench.core.running) == stored + cached
    assert bench.core.statistics().host_pages_cached == 0
    assert ask(bench, prompt(5)).request.num_cached_tokens == 0


def test_a_prefix_cache_that_is_off_uses_no_host_memory() -> None:
    bench = bench_of(enable_prefix_caching=False)
    for number in range(6):
        ask(bench, prompt(number), n=2)
    assert bench.core.counters.pages_offloaded == 0
    assert bench.core.statistics().host_pages_total == 0


def test_events_follow_a_page_to_the_host_and_back() -> None:
    bench = bench_of()
    with bench.core.feeds.cache.feed.subscribe(1000) as reader:
        for number in range(6):
            ask(bench, prompt(number))
        ask(bench, prompt(0))
        events = reader.take()
    moved = [event for event in events if event.kind == "moved"]
    assert sum(event.cache_level for event in moved) == bench.core.counters.pages_offloaded
    assert sum(not event.cache_level for event in moved) == bench.core.counters.pages_onloaded == 4
    stored = {event.hash for event in events if event.kind == "stored"}
    assert {event.hash for event in moved} <= stored


@pytest.mark.parametrize("seed", range(12))
def test_long_conversations_in_a_small_memory(seed: int) -> None:
    """Turns come and go and are given up, over a worker that knows what each page holds."""
    choose = random.Random(seed)
    bench = bench_of(
        num_pages=choose.randint(12, 24),
        num_host_pages=choose.choice([1, 5, 20, 200]),
        max_plans_in_flight=choose.choice([1, 2]),
        capacity_policy=choose.choice(["max_utilization", "guaranteed_no_evict"]),
    )
    talks = [prompt(number, choose.randint(1, 9)) for number in range(5)]
    open_turns: dict[int, Sequence] = {}
    for _ in range(120):
        number = choose.randrange(len(talks))
        turn = open_turns.get(number)
        if turn is None:
            if len(talks[number]) > 30:
                talks[number] = prompt(number, choose.randint(1, 9))
            open_turns[number] = bench.submit(talks[number], max_tokens=choose.randint(1, 6))
        elif turn.state is State.FINISHED:
            expected = reference(bench.worker, turn)
            assert turn.output_ids == expected[: len(turn.output_ids)]
            talks[number] = [*talks[number], *turn.output_ids, choose.randrange(256)]
            del open_turns[number]
        elif choose.random() < 0.1:
            bench.core.drop(turn)
            bench.core.abort(turn, ABORT)
        bench.step()
    bench.drain()
    assert bench.core.counters.pages_offloaded > 0
    assert bench.core.counters.pages_onloaded > 0
