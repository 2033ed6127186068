"""Statistics of each step: what a reader gets, what it loses, and that it all adds up."""

from __future__ import annotations

import attrs
import pytest
import trio

from tests.support.scheduling import Bench, crowd, worker
from trioserve._util.feed import Feed
from trioserve.observability.scheduler_statistics import Counters
from trioserve.protocol.errors import EngineError
from trioserve.scheduler.iterations import Iterations
from trioserve.testing import FakeWorker
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine

COUNTED = {
    "num_tokens_sampled": "num_tokens_sampled",
    "num_preemptions": "num_preempted",
    "num_prefill_tokens": "num_prefill_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "pages_evicted": "pages_evicted",
    "pages_offloaded": "pages_offloaded",
    "pages_onloaded": "pages_onloaded",
    "step_us": "step_us",
    "idle_us": "idle_us",
    "launch_us": "launch_us",
}
"""Counters, and what adds up to them in the records."""


@pytest.mark.parametrize("depth", [1, 2])
def test_records_add_up_to_the_counters(depth: int) -> None:
    bench = Bench.make(worker(num_pages=12, num_host_pages=3), max_plans_in_flight=depth)
    crowd(bench)
    for _ in range(3):
        bench.step()
    before = attrs.evolve(bench.core.counters)
    with bench.core.feeds.iterations.feed.subscribe() as reader:
        bench.drain()
        for _ in range(4):
            bench.submit([7] * 9, max_tokens=3)
        bench.drain()
        records = reader.take()
    after = bench.core.counters
    assert after.num_preemptions > before.num_preemptions
    assert after.pages_evicted > before.pages_evicted
    assert after.pages_offloaded > before.pages_offloaded
    assert [each.number for each in records] == list(
        range(before.num_steps + 1, after.num_steps + 1)
    )
    for counter, field in COUNTED.items():
        told = sum(getattr(each, field) for each in records)
        assert told == getattr(after, counter) - getattr(before, counter), counter
    tokens = sum(each.num_prefill_tokens + each.num_decode_tokens for each in records)
    assert tokens == after.num_tokens_computed - before.num_tokens_computed
    assert sum(each.num_finished for each in records) >= 9
    for each in records:
        assert each.pages_free + each.pages_cached + each.pages_held == each.pages_total == 12
        assert each.num_prefills <= each.num_sequences
        assert each.num_decode_tokens == each.num_sequences - each.num_prefills
    assert records[-1].num_running == records[-1].num_waiting == 0


def test_prefill_and_decode_are_told_apart() -> None:
    bench = Bench.make(worker(), max_num_batched_tokens=8)
    with bench.core.feeds.iterations.feed.subscribe() as reader:
        bench.submit([1] * 17, max_tokens=4)
        bench.drain()
        records = [each for each in reader.take() if each.num_sequences]
    assert [each.num_prefill_tokens for each in records] == [8, 8, 1, 0, 0, 0]
    assert [each.num_decode_tokens for each in records] == [0, 0, 0, 1, 1, 1]
    assert [each.num_tokens_sampled for each in records] == [0, 0, 1, 1, 1, 1]


def test_nothing_is_made_while_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.make(worker())
    notes: list[object] = []
    monkeypatch.setattr(Iterations, "note", lambda *arguments: notes.append(arguments))
    bench.submit([1] * 5)
    bench.drain()
    assert notes == []
    with bench.core.feeds.iterations.feed.subscribe():
        bench.submit([1] * 5)
        bench.drain()
    assert notes


async def test_a_slow_reader_loses_the_oldest() -> None:
    feed: Feed[int] = Feed()
    with feed.subscribe(3) as slow, feed.subscribe() as fast:
        for number in range(10):
            feed.publish(number)
        assert (slow.take(), slow.num_dropped) == ([7, 8, 9], 7)
        assert (fast.take(), fast.num_dropped) == (list(range(10)), 0)
        feed.publish(10)
        assert await slow.receive() == 10
    assert not feed.is_wanted
    feed.publish(11)
    assert slow.take() == []
    with pytest.raises(ValueError, match="at least 1"), feed.subscribe(0):
        pass


async def test_a_reader_waits_and_can_be_cancelled(autojump_clock: object) -> None:
    feed: Feed[int] = Feed()
    with feed.subscribe() as reader:
        with trio.move_on_after(1) as scope:
            await reader.receive()
        assert scope.cancelled_caught
        feed.publish(1)
        assert await reader.receive() == 1


async def test_an_engine_tells_its_steps(autojump_clock: object) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.01)) as engine:
        await engine.complete("before", max_tokens=2)
        with engine.iterations() as iterations:
            start = trio.current_time()
            await engine.complete("abc", max_tokens=3)
            records = [await iterations.receive(), *iterations.take()]
            first, *rest = (each for each in records if each.num_sequences)
            assert first.num_prefill_tokens == 3
            assert start < first.time <= start + 0.03
        assert [each.num_decode_tokens for each in rest] == [1, 1]
        assert [each.num_finished for each in rest] == [0, 1]
        assert records[-1].number == engine.statistics().scheduler.num_steps


async def test_an_encoder_tells_its_calls(autojump_clock: object) -> None:
    def make() -> FakeWorker:
        return fake_encoder(fake_encoder_config(), call_time=1.0, max_num_seqs=2)

    async with open_fake_encoder(make_worker=make) as engine:
        with engine.iterations() as iterations:
            await engine.embed(["abc", "de", "f"])
            records = iterations.take()
        assert [each.number for each in records] == [1, 2]
        assert [each.num_sequences for each in records] == [2, 1]
        assert [each.num_prefill_tokens for each in records] == [5, 1]
        assert [each.num_running for each in records] == [1, 0]
        assert [each.step_us for each in records] == [1_000_000, 1_000_000]
        statistics = engine.statistics().scheduler
        assert (statistics.num_steps, statistics.step_us) == (2, 2_000_000)
        await engine.embed("g")
        assert iterations.take() == []


async def test_the_end_of_the_engine_is_the_end_of_the_records() -> None:
    async with open_fake_engine() as engine:
        subscription = engine.iterations()
    with subscription as iterations, pytest.raises(EngineError, match="closed"):
        await iterations.receive()


def test_counters_and_records_have_the_same_names() -> None:
    of_drafts = {"num_drafts", "num_draft_tokens", "num_accepted_drafts"} | {"accepted_by_position"}
    others = {"num_steps", "num_tokens_computed", "num_corrupted"}
    others |= {"pages_written", "pages_read", "pages_imported", "num_handed_over"}
    counters = {field.name for field in attrs.fields(Counters)}
    assert set(COUNTED) | of_drafts | others == counters
