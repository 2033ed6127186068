"""The feed of the prefix caches: a copy that follows it has exactly the caches' pages."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.scheduler.test_host_pages import OffloadMachine
from trioserve.engine import cache_feed
from trioserve.engine.cache_copy import CacheCopy, FeedGap
from trioserve.engine.cache_feed import CacheFeed, CacheReader
from trioserve.engine.engine import Engine
from trioserve.protocol.errors import WatcherLimit
from trioserve.protocol.wire import from_ints
from trioserve.scheduler.cache_events import namespace_hash, page_hash, prompt_hashes
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.step_time import StepLoad
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


class FeedMachine(OffloadMachine):
    """A reader with little room follows the caches; batches are lost, and it begins anew."""

    def __init__(self) -> None:
        super().__init__()
        feeds = Feeds()
        self.cache.events = feeds.cache
        core = SimpleNamespace(memory=SimpleNamespace(prefix=self.cache, pool=self.pool))
        scheduler = cast(Any, SimpleNamespace(index=3, core=core, feeds=feeds))
        self.feed = CacheFeed(lambda: [scheduler])
        self.feed.loads = lambda: [cache_feed.LoadReport(worker=3)]  # type: ignore[method-assign]
        self.scope = contextlib.ExitStack()
        self.reader: CacheReader
        self.copied = CacheCopy()
        self.begin_anew()

    def teardown(self) -> None:
        self.settle()
        self.scope.close()

    @rule()
    def begin_anew(self) -> None:
        self.scope.close()
        self.reader = self.scope.enter_context(self.feed.reader(max_events=4))
        self.copied = CacheCopy()

    @rule()
    def take(self) -> None:
        try:
            self.copied.apply(self.reader.take_now())
        except FeedGap:
            self.begin_anew()

    @rule()
    def lose(self) -> None:
        """Lose a batch on its way; the next one shows it, unless that begins a snapshot."""
        batch = self.reader.take_now()
        if batch.snapshot:
            self.copied = CacheCopy()

    @rule()
    def settle(self) -> None:
        for _ in range(100):
            self.take()
            if self.copied.complete and not self.reader._events and not self.reader._begins:
                break
        expected: dict[int, int] = {}
        for (namespace, path), node in self.nodes().items():
            if len(namespace) == 1:  # else it is flushed
                hash = namespace_hash(str(namespace[0]))
                for token in path:
                    hash = page_hash(hash, [token])
                expected[hash] = int(self.pool.is_on_host(node.page))
        assert self.copied.pages.get(3, {}) == expected

    @rule(
        path=st.lists(st.integers(0, 1), min_size=1, max_size=6), salt=st.sampled_from(["", "salt"])
    )
    def match(self, path: list[int], salt: str) -> None:
        """Compare how much of a prompt the copy and the cache find."""
        self.settle()
        found = self.cache.match((salt,), from_ints(path), plan=-1)
        hashes = prompt_hashes(namespace_hash(salt), path, 1)
        expected = (len(found.nodes) - found.num_on_host, found.num_on_host)
        assert self.copied.num_cached(3, hashes) == expected


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "SLICE", 2)


TestFeed = FeedMachine.TestCase
TestFeed.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


PROMPT = "all that begins alike is computed once, and so is this, which is long enough for pages"


async def followed(engine: Engine, reader: CacheReader, copied: CacheCopy) -> None:
    """Have ``copied`` apply all that has happened; it must then have the caches' pages."""
    copied.apply(await reader.take())
    while not copied.complete or reader._events:
        copied.apply(await reader.take())
    for scheduler in engine.schedulers:
        assert scheduler.core is not None
        prefix = scheduler.core.memory.prefix
        assert len(copied.pages.get(scheduler.index, {})) == prefix.num_nodes


async def test_a_late_reader_gets_a_snapshot(autojump_clock: object) -> None:
    async with open_fake_engine(data_parallel_size=2, routing_policy="round_robin") as engine:
        for each in range(4):
            await engine.complete(f"{each}{PROMPT}", max_tokens=3)
        feed, copied = engine.schedulers.cache_feed, CacheCopy()
        with feed.reader() as reader:
            await followed(engine, reader, copied)
            assert sorted(copied.pages) == [0, 1]
            ids = engine.tokenizer.encode(f"0{PROMPT}")
            hashes = prompt_hashes(namespace_hash(""), ids, engine.ready.page_size)
            assert len(hashes) in {copied.num_cached(worker, hashes)[0] for worker in (0, 1)}
            salted = prompt_hashes(namespace_hash("other"), ids, engine.ready.page_size)
            assert copied.num_cached(0, salted) == copied.num_cached(1, salted) == (0, 0)
            await engine.complete("x" + PROMPT, max_tokens=3)
            await followed(engine, reader, copied)
            engine.flush_cache()
            await followed(engine, reader, copied)
            assert not any(copied.pages.values())


async def test_all_readers_get_the_same_numbers(autojump_clock: object) -> None:
    async with open_fake_engine(data_parallel_size=2, routing_policy="round_robin") as engine:
        with engine.cache_events() as one:
            await engine.complete(PROMPT, max_tokens=3)
            with engine.cache_events() as other:
                await engine.complete(PROMPT, max_tokens=3)
                ones, others = one.take(), other.take()
        assert [each.number for each in ones] == list(range(1, len(ones) + 1))
        assert others == ones[-len(others) :]
        assert {each.worker for each in ones} == {0, 1}


async def test_the_cache_of_an_added_worker_is_told(autojump_clock: object) -> None:
    async with open_fake_engine(routing_policy="round_robin") as engine:
        copied = CacheCopy()
        with engine.schedulers.cache_feed.reader() as reader:
            await engine.add_worker()
            for each in range(2):
                await engine.complete(f"{each}{PROMPT}", max_tokens=3)
            await followed(engine, reader, copied)
            assert all(copied.pages[worker] for worker in (0, 1))
            await engine.remove_worker(1)
            await followed(engine, reader, copied)
            assert list(copied.pages) == list(copied.loads) == [0]


async def test_a_slow_reader_gets_a_new_snapshot(autojump_clock: object) -> None:
    async with open_fake_engine() as engine:
        copied = CacheCopy()
        with engine.schedulers.cache_feed.reader(max_events=3) as reader:
            await followed(engine, reader, copied)
            for each in range(5):
                await engine.complete(f"{each}{PROMPT}", max_tokens=3)
                assert len(reader._events) <= 3
            assert (await reader.take()).snapshot
            with pytest.raises(FeedGap):  # because the snapshot's first batch was lost
                copied.apply(await reader.take())


async def test_a_lost_worker_has_no_pages(autojump_clock: object) -> None:
    async with open_fake_engine() as engine:
        copied = CacheCopy()
        with engine.schedulers.cache_feed.reader() as reader:
            await engine.complete(PROMPT, max_tokens=3)
            await followed(engine, reader, copied)
            assert copied.pages[0]
            assert copied.loads[0].serves
            await engine.release_memory()
            await followed(engine, reader, copied)
            assert not copied.pages[0]
            assert not copied.loads[0].serves
            await engine.resume_memory()


async def test_loads_are_told_as_the_router_sees_them(autojump_clock: object) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.01), max_num_seqs=4) as engine:
        with engine.schedulers.cache_feed.reader() as reader:
            async with trio.open_nursery() as nursery:
                for each in range(6):
                    nursery.start_soon(lambda each=each: engine.complete(f"{each}", max_tokens=50))
                await trio.sleep(0.1)
                while (changes := await reader.take()).loads[0].num_decodes < 4:
                    pass
                (load,) = changes.loads
                assert (load.num_prompts, load.num_free) == (2, -2)
                assert load.context > 4
                assert load.is_known
                seen = load.load(prompt_tokens=7, num=1)
                assert (seen.num_ahead, seen.num_prompts) == (4, 3)
                assert seen.model.predict(StepLoad(decodes=1)) > 0
                nursery.cancel_scope.cancel()


async def test_readers_are_few_and_leave_nothing(autojump_clock: object) -> None:
    async with open_fake_engine() as engine:
        feed = engine.schedulers.cache_feed
        with contextlib.ExitStack() as stack:
            for _ in range(cache_feed.MAX_READERS):
                stack.enter_context(feed.reader())
            with pytest.raises(WatcherLimit):
                stack.enter_context(feed.reader())
        scheduler = engine.schedulers[0]
        assert not scheduler.feeds.cache.feed.is_wanted
        assert not scheduler.feeds.iterations.feed.is_wanted
