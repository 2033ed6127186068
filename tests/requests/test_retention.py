"""Retention of a request's KV: its values, and its effect on pages."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio

from tests.support.scheduling import ABORT, Bench, make_request, worker
from trioserve.protocol.errors import AdapterNotFound, InvalidRequest
from trioserve.protocol.wire import from_ints
from trioserve.requests.request import Sequence, State
from trioserve.requests.retention import MAX_RANGES, Retention, RetentionRange
from trioserve.scheduler.cache_events import CacheEvent, page_hash
from trioserve.scheduler.prefix_cache import Node
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

INF = float("inf")


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: RetentionRange(-1, 4, 35), "start"),
        (lambda: RetentionRange(0, 0, 35), "end"),
        (lambda: RetentionRange(4, 2, 35), "end"),
        (lambda: RetentionRange(0, None, 101), "priority"),
        (lambda: RetentionRange(0, None, True), "priority"),
        (lambda: RetentionRange(0, None, 35, -1), "duration_ms"),
        (lambda: RetentionRange(0, 1.5, 35), "end"),  # type: ignore[arg-type]
        (lambda: Retention(output_priority=-1), "output_priority"),
        (lambda: Retention(output_duration_ms=-1), "output_duration_ms"),
        (lambda: Retention([RetentionRange(0, 4, 1), RetentionRange(3, 8, 1)]), "ranges"),
        (lambda: Retention([RetentionRange(0, None, 1), RetentionRange(9, 10, 1)]), "ranges"),
        (lambda: Retention([(0, 4, 1)]), "ranges"),  # type: ignore[list-item]
        (
            lambda: Retention([RetentionRange(i, i + 1, 1) for i in range(MAX_RANGES + 1)]),
            "ranges",
        ),
    ],
)
def test_what_may_not_be_said(make: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == f"retention.{param}"


def test_a_page_goes_by_its_first_token() -> None:
    retention = Retention(
        [RetentionRange(0, 5, 80), RetentionRange(7, None, 10, 1500)], output_priority=60
    )
    # Pages begin at 0, 4, 8, 12; the prompt has 10 tokens.
    assert retention.of_pages(4, 10, 5) == [(80, INF), (80, INF), (10, 1.5), (60, INF), (60, INF)]
    assert retention.of_pages(4, 10, 1) == [(80, INF)]
    assert Retention().of_pages(4, 10, 3) == [None] * 3
    whole = Retention([RetentionRange(0, None, 90)])
    assert whole.of_pages(4, 8, 3) == [(90, INF), (90, INF), None]
    assert whole.behind(8).of_pages(4, 16, 5) == [None, None, (90, INF), (90, INF), None]
    later = Retention([RetentionRange(8, 13, 80), RetentionRange(15, None, 10, 1500)])
    assert attrs.evolve(retention, output_priority=None).behind(8) == later


def ask(bench: Bench, prompt: list[int], retention: Retention | None, **options: Any) -> Sequence:
    request = make_request(prompt, **{"max_tokens": 1, **options})
    request.retention = retention
    bench.core.submit(request, bench.now)
    return request.sequences[0]


def num_cached(bench: Bench, prompt: list[int], salt: str = "") -> int:
    return 4 * len(bench.core.memory.prefix.match((salt,), from_ints(prompt), plan=-1).nodes)


def prompt(number: int) -> list[int]:
    return [number] * 17


def whole(priority: int, duration_ms: int | None = None) -> Retention:
    return Retention([RetentionRange(0, None, priority, duration_ms)])


def test_the_lowest_priority_goes_first() -> None:
    bench = Bench.make(worker(num_pages=20))
    for number, priority in ((1, 80), (2, 10), (3, None), (4, 50)):
        ask(bench, prompt(number), None if priority is None else whole(priority))
        bench.drain()
    assert [num_cached(bench, prompt(number)) for number in (1, 2, 3, 4)] == [16] * 4
    ask(bench, prompt(5), None)
    bench.drain()
    assert [num_cached(bench, prompt(number)) for number in (1, 2, 3, 4)] == [16, 12, 16, 16]
    ask(bench, prompt(6), None)
    bench.drain()
    assert [num_cached(bench, prompt(number)) for number in (1, 2, 3, 4)] == [16, 0, 12, 16]
    assert bench.core.counters.pages_evicted == 5


def test_a_duration_ends() -> None:
    bench = Bench.make(worker(num_pages=12))
    ask(bench, prompt(1), whole(80, duration_ms=5000))
    bench.drain()
    ask(bench, prompt(2), None)
    bench.drain()
    bench.now += 4.9
    ask(bench, prompt(3), None)
    bench.drain()
    assert (num_cached(bench, prompt(1)), num_cached(bench, prompt(2))) == (16, 12)
    bench.now += 0.2
    for number in (4, 5):
        ask(bench, prompt(number), None)
        bench.drain()
    # Expired, it counts as idle from then on: later than 3, which went first.
    assert (num_cached(bench, prompt(3)), num_cached(bench, prompt(1))) == (0, 12)
    ask(bench, prompt(6), None)
    bench.drain()
    assert num_cached(bench, prompt(1)) == 0


def test_the_output_has_a_priority_of_its_own() -> None:
    bench = Bench.make(worker(num_pages=16))
    sequence = ask(bench, prompt(1), Retention(output_priority=90), max_tokens=16)
    bench.drain()
    said = [*prompt(1), *sequence.output_ids]
    assert num_cached(bench, said) == 32
    for number in (2, 3, 4):
        ask(bench, prompt(number), None)
        bench.drain()
    # What comes before the output is kept with it.
    assert num_cached(bench, said) == 32


def test_what_ends_early_has_its_priority_too() -> None:
    bench = Bench.make(worker(num_pages=20))
    sequence = ask(bench, prompt(1), whole(80), max_tokens=50)
    bench.step()
    bench.core.abort(sequence, ABORT)
    bench.drain()
    levels = {bench.core.memory.pool.level(page) for page in bench.core.memory.pool.kept()}
    assert levels == {80}
    bench.core.memory.flush(bench.core.running)
    bench.core.check_integrity()


def test_pages_that_were_flushed_are_worth_nothing() -> None:
    bench = Bench.make(worker(num_pages=20))
    sequence = ask(bench, prompt(1), whole(80), max_tokens=50)
    bench.step()
    bench.core.memory.flush(bench.core.running)
    bench.core.abort(sequence, ABORT)
    bench.drain()
    levels = {bench.core.memory.pool.level(page) for page in bench.core.memory.pool.kept()}
    assert levels == {35}


def test_salts_have_priorities_of_their_own() -> None:
    bench = Bench.make(worker(num_pages=10))
    ask(bench, prompt(1), whole(80), salt="mine")
    bench.drain()
    ask(bench, prompt(1), whole(0), salt="yours")
    bench.drain()
    ask(bench, prompt(2), None)
    bench.drain()
    assert num_cached(bench, prompt(1), "mine") == 16
    assert num_cached(bench, prompt(1), "yours") == 4


@attrs.define
class Follower:
    """Knows what is cached by its events alone."""

    parents: dict[int, int | None] = attrs.field(factory=dict)

    def take(self, events: list[CacheEvent]) -> None:
        for event in events:
            if event.kind == "stored":
                assert event.hash not in self.parents
                assert event.parent_hash is None or event.parent_hash in self.parents
                assert event.num_tokens == 4
                self.parents[event.hash] = event.parent_hash
            elif event.kind == "removed":
                assert event.hash not in self.parents.values()
                self.parents.pop(event.hash, None)
            else:
                self.parents.clear()


def test_hashes_are_those_of_the_tokens() -> None:
    bench = Bench.make(worker())
    with bench.core.feeds.cache.feed.subscribe() as reader:
        ask(bench, [1, 2, 3, 4, 5, 6, 7, 8, 9], None)
        bench.drain()
        first, second = reader.take()
    assert (first.kind, first.parent_hash, second.parent_hash) == ("stored", None, first.hash)
    assert second.hash == page_hash(first.hash, (5, 6, 7, 8))


@pytest.mark.parametrize("seed", range(20))
def test_events_tell_what_is_cached(seed: int) -> None:
    choose = random.Random(seed)
    bench = Bench.make(worker(num_pages=24), max_plans_in_flight=choose.choice([1, 2]))
    follower = Follower()
    running: list[Sequence] = []
    with bench.core.feeds.cache.feed.subscribe(10_000) as reader:
        for _ in range(120):
            what = choose.random()
            if what < 0.3:
                tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 25))]
                retention = whole(choose.randrange(101), choose.choice([None, 1000]))
                running.append(
                    ask(
                        bench,
                        tokens,
                        choose.choice([None, retention]),
                        max_tokens=choose.randrange(1, 12),
                        salt=choose.choice(["", "salt"]),
                    )
                )
            elif what < 0.35 and running:
                sequence = choose.choice(running)
                if sequence.state is not State.FINISHED:
                    bench.core.drop(sequence) if sequence.state is State.DECODE else None
                    bench.core.abort(sequence, ABORT)
            elif what < 0.37:
                bench.core.memory.flush(bench.core.running)
            else:
                bench.now += choose.choice([0.0, 0.4])
                bench.step()
        bench.drain()
        follower.take(reader.take())
        assert reader.num_dropped == 0
        bench.core.memory.flush(bench.core.running)
        follower.take(reader.take())
        assert follower.parents == {}
        ask(bench, prompt(1), None)
        bench.drain()
        follower.take(reader.take())
    assert len(follower.parents) == bench.core.memory.pool.num_idle == 4
    assert not any(isinstance(each, Node) for each in bench.core.feeds.cache._hashes)


async def test_a_whole_engine_keeps_what_it_is_told_to(autojump_clock: object) -> None:
    async with open_fake_engine(
        lambda: FakeWorker(step_time=0.01, num_pages=16, page_size=4)
    ) as engine:
        with engine.cache_events() as events:
            await engine.complete("a" * 17, max_tokens=1, retention=whole(90))
            for letter in "bcdefg":
                await engine.complete(letter * 17, max_tokens=1)
            again = await engine.complete("a" * 17, max_tokens=1)
            kinds = {event.kind for event in events.take()}
        assert again.usage.cached_tokens == 16
        assert kinds == {"stored", "removed"}
        assert engine.statistics().scheduler.pages_evicted > 0
        await trio.testing.wait_all_tasks_blocked()
        engine.check_integrity()


async def test_an_unknown_adapter_is_named_before_a_wrong_retention(autojump_clock: object) -> None:
    wrong: Any = "forever"
    async with open_fake_engine() as engine:
        with pytest.raises(AdapterNotFound, match="no adapter 'none' is loaded"):
            engine.generate("a", adapter="none", retention=wrong)
        with pytest.raises(InvalidRequest, match="retention must be a Retention") as caught:
            engine.generate("a", retention=wrong)
        assert caught.value.param == "retention"
