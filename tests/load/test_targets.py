"""Targets of requests: real sockets, with and without TLS, and an engine in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio

from trioserve import Engine, ServerConfig
from trioserve.config import EngineConfig
from trioserve.http import create_app
from trioserve.http.server.server import serve_app
from trioserve.load import (
    AnyTarget,
    Cancel,
    Conversation,
    EmbeddedTarget,
    Record,
    Target,
    Turn,
    chats,
    closed_loop,
    figures_of,
    open_loop,
    parse_url,
    random_prompts,
)
from trioserve.load.datasets import Lengths, with_cancellations
from trioserve.load.measure import MeasureError, Point, count_tokens, measure, warm_up
from trioserve.load.texts import CountedTexts, GuessedTexts
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine

TEXTS = CountedTexts(byte_tokenizer())
FIELDS = {
    "model": "fake",
    "temperature": 0,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "ignore_eos": True,
    "seed": 7,
}


async def assert_idle(engine: Engine, *, within: float = 10.0) -> None:
    """Everything that was asked of the engine is over, and nothing of it is held."""
    with trio.move_on_after(within):
        while not engine.idle:
            await trio.sleep(0.005)
    assert engine.idle
    engine.check_integrity()
    scheduler = engine.statistics().scheduler
    assert scheduler.pages_free + scheduler.pages_cached == scheduler.pages_total


@contextlib.asynccontextmanager
async def served(engine: Engine, **options: Any) -> AsyncIterator[str]:
    """Yield the URL of a real server over the engine."""
    config = ServerConfig(engine=EngineConfig("fake"), **{"port": 0, **options})
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        yield url
        nursery.cancel_scope.cancel()


def http(url: str, *, chat: bool = False, **more: Any) -> Target:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Target(connect=parse_url(url).connect(), path=path, fields=FIELDS, **more)


def told(record: Record) -> dict[str, Any]:
    """Return the fields that don't depend on time."""
    names = ("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "error")
    fields = {name: getattr(record, name) for name in names}
    return {**fields, "place": (record.conversation, record.turn), "cancelled": record.cancelled}


async def test_an_embedded_engine_and_its_server_give_like_records() -> None:
    work = random_prompts(TEXTS, 12, Lengths(input_tokens=20, output_tokens=12, range_ratio=0.5))
    async with open_fake_engine(lambda: FakeWorker(step_time=0.002)) as engine:
        async with served(engine) as url:
            over_http = await closed_loop(http(url), work, 4)
        target = EmbeddedTarget(engine=engine, fields=FIELDS)
        embedded = await closed_loop(target, work, 4)
        await assert_idle(engine)
    assert list(map(told, embedded.records)) == list(map(told, over_http.records))
    for run in (embedded, over_http):
        figures = figures_of(run)
        assert (figures.completed, figures.failed, figures.prompt_tokens) == (
            12, 0, sum(TEXTS.count(str(one.turns[0].prompt)) for one in work)
        )  # fmt: skip
        for record in run.records:
            assert record.completion_tokens == len(record.token_ids) >= len(record.chunks) - 1
            assert record.first_text is not None
            assert record.ended is not None
            assert record.started < record.first_text <= record.chunks[-1] <= record.ended
            assert record.chunks == sorted(record.chunks)


async def test_chats_go_both_ways_alike() -> None:
    work = chats(TEXTS, 2, Lengths(input_tokens=9, output_tokens=5), turns=3)
    async with open_fake_engine(lambda: FakeWorker(step_time=0.002)) as engine:
        async with served(engine) as url:
            over_http = await closed_loop(http(url, chat=True), work, 2)
        embedded = await closed_loop(
            EmbeddedTarget(engine=engine, chat=True, fields=FIELDS), work, 2
        )
    texts = [[record.text for record in run.records] for run in (embedded, over_http)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6
    counts = [
        [record.prompt_tokens or 0 for record in run.records] for run in (embedded, over_http)
    ]
    assert counts[0] == counts[1]
    assert counts[0][0] < counts[0][1] < counts[0][2]
    # A server sends the role before the first text; an engine has no such event.
    roles = over_http.records[0]
    assert roles.first_text is not None
    assert roles.chunks[0] <= roles.first_text


Leaving = Callable[[Engine, AnyTarget], Awaitable[None]]


@pytest.mark.parametrize("embedded", [False, True], ids=["http", "embedded"])
@pytest.mark.parametrize("cancel", [Cancel(events=3), Cancel(seconds=0.08)], ids=["events", "time"])
async def test_a_client_that_leaves_really_leaves(embedded: bool, cancel: Cancel) -> None:
    """Abort its request long before its end; the others go on."""
    stays = Turn(prompt="stays", max_tokens=20)
    leaves = Turn(prompt="leaves", max_tokens=900, cancel=cancel)
    work = [Conversation(turns=(turn, turn)) for turn in (stays, leaves, leaves)]
    async with open_fake_engine(lambda: FakeWorker(step_time=0.02, max_model_len=1000)) as engine:
        async with contextlib.AsyncExitStack() as stack:
            target: AnyTarget = EmbeddedTarget(engine=engine, fields=FIELDS)
            if not embedded:
                target = http(await stack.enter_async_context(served(engine)))
            with trio.fail_after(15):
                run = await closed_loop(target, work, 3)
            # Hundreds of steps of 20 ms would still be to come.
            await assert_idle(engine, within=10.0)
    assert [record.cancelled for record in run.records] == [False, False, True, True]
    assert [record.conversation for record in run.records] == [0, 0, 1, 2]
    for record in run.records[2:]:
        assert not record.error
        assert record.ended is not None
        if cancel.events is not None:
            assert cancel.events <= len(record.chunks) < 100
        else:
            assert 0.08 <= record.ended - record.started < 15.0
    figures = figures_of(run)
    assert (figures.completed, figures.cancelled, figures.failed) == (2, 2, 0)
    assert figures.completion_tokens == 40


async def test_cancellations_of_a_whole_run_leave_nothing_behind() -> None:
    # Enough tokens for the clients to leave, although a busy machine puts some into one event.
    work = random_prompts(TEXTS, 30, Lengths(input_tokens=5, output_tokens=300))
    work = with_cancellations(work, rate=0.5, events=(1, 9), seed=2)
    expected = sum(one.turns[0].cancel is not None for one in work)
    async with open_fake_engine(lambda: FakeWorker(step_time=0.001)) as engine:
        async with served(engine) as url:
            run = await open_loop(http(url), work, [n / 200 for n in range(30)])
            await assert_idle(engine)
    assert figures_of(run).cancelled == expected > 5
    assert figures_of(run).completed == 30 - expected


async def test_an_engine_past_its_time_or_that_refuses_is_an_error_too() -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.01)) as engine:
        slow = EmbeddedTarget(engine=engine, fields=FIELDS, timeout=0.05)
        odd = EmbeddedTarget(engine=engine, fields={"typo": 1})
        request = {"prompt": "x", "max_tokens": 300}
        late = (await closed_loop(slow, [request], 1)).records[0]
        refused = (await closed_loop(odd, [request], 1)).records[0]
        await assert_idle(engine)
    assert (late.error_kind, late.cancelled) == ("timeout", False)
    assert (refused.error_kind, refused.error) == (
        "InvalidRequest", "an embedded engine doesn't know typo"
    )  # fmt: skip


# -- measurements


async def test_a_warm_up_is_short_and_its_failure_ends_everything() -> None:
    work = random_prompts(TEXTS, 3, Lengths(input_tokens=4, output_tokens=500))
    async with open_fake_engine(lambda: FakeWorker(step_time=0.001)) as engine:
        target = EmbeddedTarget(engine=engine, fields=FIELDS)
        ended: list[int] = []
        engine.on_request_end = lambda request: ended.append(len(request.sequences[0].output_ids))
        await warm_up(target, [], 1)
        await warm_up(target, work, 3)
        assert ended == [16, 16, 16]
        with pytest.raises(MeasureError, match="warm-up failed: an embedded engine doesn't know"):
            await warm_up(EmbeddedTarget(engine=engine, fields={"typo": 1}), work, 1)


async def test_a_point_is_a_closed_or_an_open_loop() -> None:
    work = random_prompts(TEXTS, 4, Lengths(input_tokens=4, output_tokens=3))
    async with open_fake_engine(lambda: FakeWorker(step_time=0.001)) as engine:
        target = EmbeddedTarget(engine=engine, fields=FIELDS)
        closed = await measure(target, Point(work=work, concurrency=2), series="ours")
        times = [0.0, 0.01, 0.02, 0.03]
        opened = await measure(target, Point(work=work, arrivals=times, rate=100.0, concurrency=9))
        traced = await measure(target, Point(work=work, arrivals=times))
    assert (closed.label, closed.series, closed.figures.completed) == ("2 streams", "ours", 4)
    assert (opened.label, opened.figures.rate) == ("100 requests/s, 9 at a time", 100.0)
    assert (traced.label, traced.figures.completion_tokens) == ("trace", 12)
    assert Point(work=work, concurrency=1).label == "1 stream"


def test_tokens_that_a_server_does_not_count_are_counted_here() -> None:
    from trioserve.load import Run

    def run() -> Run:
        records = [Record(started=0.0, chunks=[1.0], text="abc", conversation=n) for n in range(3)]
        records[1].fail("HTTP 500", "no")
        return Run(concurrency=1, records=records, duration=1.0)

    work = [
        Conversation(turns=(Turn(prompt="hello"),)),
        Conversation(turns=(Turn(prompt="x"),)),
        Conversation(turns=(Turn(messages=({"role": "user", "content": "hey"},)),)),
    ]
    counted = run()
    count_tokens(counted, work, TEXTS)
    assert [r.completion_tokens for r in counted.records] == [3, None, 3]
    assert [r.prompt_tokens for r in counted.records] == [5, None, 3]
    for texts in (None, GuessedTexts()):
        with pytest.raises(MeasureError, match="counts no tokens"):
            count_tokens(run(), work, texts)
