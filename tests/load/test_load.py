"""The load generator against scripted servers on virtual time, so that every figure is exact."""

from __future__ import annotations

import functools
import itertools
import math
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.support.load_server import (
    CUT,
    DONE,
    FakeServer,
    Script,
    event,
    simple,
    target,
    text,
    usage,
)
from trioserve.load import (
    Cancel,
    Conversation,
    Figures,
    Record,
    Run,
    Target,
    Turn,
    closed_loop,
    figures_of,
    over_tcp,
    send,
)


def echo(body: dict[str, Any]) -> Script:
    """Return the prompt itself, later for smaller ones."""
    return [(10.0 - float(body["prompt"]), text(body["prompt"])), (0.0, usage(1, 1))]


async def one(script: Callable[[dict[str, Any]], Script], **options: Any) -> Record:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, script, **options)
        record = await send(target(server), {"prompt": "x"})
    return record


async def test_a_record_holds_the_times_text_and_counts(autojump_clock: Any) -> None:
    record = await one(simple)
    assert not record.error
    assert [time - record.started for time in record.chunks] == pytest.approx([1, 2, 2.5, 4.5])
    assert record.first_text is not None
    assert record.first_text - record.started == pytest.approx(2)
    assert (record.text, record.finish_reason) == ("abc", "length")
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)


async def test_figures_of_one_request_follow_their_definitions(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, simple)
        figures = figures_of(await closed_loop(target(server), [{"prompt": "x"}], 1))
    assert figures.duration == pytest.approx(4.5)
    assert figures.ttft_ms.p50 == pytest.approx(1000)
    assert figures.first_text_ms.p50 == pytest.approx(2000)
    assert figures.itl_ms.mean == pytest.approx(3500 / 3)
    assert figures.itl_ms.p50 == pytest.approx(1000)
    assert figures.e2e_ms.p99 == pytest.approx(4500)
    assert figures.tpot_ms.mean == pytest.approx(3500 / 2)
    assert figures.output_tokens_per_second == pytest.approx(3 / 4.5)
    assert figures.total_tokens_per_second == pytest.approx(10 / 4.5)
    assert (figures.completed, figures.failed) == (1, 0)


async def test_chat_deltas_are_read_alike(autojump_clock: Any) -> None:
    def chat(_: dict[str, Any]) -> Script:
        return [
            (1.0, event(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}])),
            (1.0, event(choices=[{"index": 0, "delta": {"content": "hi"}}])),
            (1.0, event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])),
            (0.0, usage(4, 2) + DONE),
        ]

    record = await one(chat)
    assert (record.text, record.finish_reason, len(record.chunks)) == ("hi", "stop", 3)
    assert record.first_text == pytest.approx(record.started + 2)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_beside_the_text(name: str, autojump_clock: Any) -> None:
    def chat(_: dict[str, Any]) -> Script:
        deltas = [{"role": "assistant"}, {name: "Well, "}, {name: "so", "content": "h"}]
        deltas += [{"content": "i"}]
        return [(1.0, event(choices=[{"index": 0, "delta": delta}])) for delta in deltas]

    record = await one(chat)
    assert (record.text, record.reasoning) == ("hi", "Well, so")
    assert record.first_text == pytest.approx(record.started + 2)


async def test_events_may_be_cut_anywhere_and_stand_beside_comments(autojump_clock: Any) -> None:
    whole = b": waiting\n\n" + text("a").replace(b"\n", b"\r\n") + b"\n" + text("é") + usage(1, 2)
    for size in (1, 3, 1000):
        pieces = [(0.0, whole[i : i + size]) for i in range(0, len(whole), size)]
        record = await one(lambda _, pieces=pieces: pieces)
        assert (record.text, record.completion_tokens, record.error) == ("aé", 2, "")


async def test_a_closed_loop_keeps_its_streams_busy_over_one_connection_each(
    autojump_clock: Any,
) -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, simple)
        requests = [{"prompt": str(i)} for i in range(10)]
        run = await closed_loop(target(server, headers={"Authorization": "Bearer k"}), requests, 4)
    assert sorted(int(body["prompt"]) for _, body in server.requests) == list(range(10))
    assert all(body["stream"] and body["max_tokens"] == 3 for _, body in server.requests)
    assert all((b"authorization", b"Bearer k") in head.headers for head, _ in server.requests)
    assert (server.most_active, server.connections) == (4, 4)
    # Ten requests of 4.5 s over four streams are three rounds.
    assert run.duration == pytest.approx(13.5)
    assert figures_of(run).output_tokens_per_second == pytest.approx(30 / 13.5)


async def test_records_stand_in_the_order_of_the_requests(autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, echo)
        run = await closed_loop(target(server), [{"prompt": str(i)} for i in range(9)], 3)
    assert [record.text for record in run.records] == [str(i) for i in range(9)]


@pytest.mark.parametrize("tells", [True, False])
async def test_a_server_that_closes_gets_a_new_connection(tells: bool, autojump_clock: Any) -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, simple, close_after_each=True, tells=tells)
        run = await closed_loop(target(server), [{}, {}, {}], 1)
    assert [record.error for record in run.records] == ["", "", ""]
    assert [record.text for record in run.records] == ["abc"] * 3
    assert len(server.requests) == server.connections == 3


async def test_what_breaks_after_its_first_byte_is_not_asked_again(autojump_clock: Any) -> None:
    def breaks_later(body: dict[str, Any]) -> Script:
        return simple(body) if body["prompt"] == "first" else [(1.0, CUT)]

    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, breaks_later)
        requests = [{"prompt": "first"}, {"prompt": "second"}, {"prompt": "first"}]
        run = await closed_loop(target(server), requests, 1)
    assert [bool(record.error) for record in run.records] == [False, True, False]
    assert [body["prompt"] for _, body in server.requests] == ["first", "second", "first"]


async def test_a_connection_that_ends_while_it_is_idle_costs_no_request() -> None:
    """Use real sockets; their end shows before the next request, or only in place of an answer."""

    async def answer_once(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        body = b"".join(data for _, data in simple({}))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        await stream.send_all(head + body)
        if next(closes) == "late":
            await stream.receive_some(4096)  # the next request, which it doesn't look at

    for how in ("at once", "late"):
        closes = itertools.repeat(how)
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(
                functools.partial(trio.serve_tcp, answer_once, 0, host="127.0.0.1")
            )
            port = listener.socket.getsockname()[1]
            connect = over_tcp(f"http://127.0.0.1:{port}")
            wanted = Target(connect=connect, path="/v1/completions", fields={})
            run = await closed_loop(wanted, [{}, {}, {}], 1)
            nursery.cancel_scope.cancel()
        assert [record.error for record in run.records] == ["", "", ""]


@pytest.mark.parametrize(
    ("script", "cancel"),
    [
        ([(1.0, text("a") + event(error="it died"))], Cancel(events=1)),
        ([(1.0, event(error="it died")), (1.0, text("a"))], Cancel(events=1)),
        ([(1.0, text("a") + event(error="it died")), (9.0, DONE)], Cancel(seconds=5.0)),
    ],
    ids=["one read", "two reads", "time"],
)
async def test_what_failed_before_the_client_left_counts_once(
    script: Script, cancel: Cancel, autojump_clock: Any
) -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, lambda _: script)
        leaves = Conversation(turns=(Turn(prompt="x", cancel=cancel),))
        run = await closed_loop(target(server), [leaves], 1)
        nursery.cancel_scope.cancel()
    figures = figures_of(run)
    assert (figures.completed, figures.failed, figures.cancelled) == (0, 1, 0)
    assert run.records[0].error == "it died"


async def test_failures_are_recorded_and_the_loop_goes_on(autojump_clock: Any) -> None:
    def sometimes(body: dict[str, Any]) -> Script:
        if body["prompt"] == "cut":
            return [(0.5, text("a")), (0.5, CUT)]
        if body["prompt"] == "hang":
            return [(0.5, text("a")), (1000.0, DONE)]
        if body["prompt"] == "event":
            return [(0.5, event(error={"message": "the worker died", "type": "server_error"}))]
        if body["prompt"] == "nonsense":
            return [(0.5, b"data: {\n\n")]
        if body["prompt"] == "nothing":
            return [(0.5, DONE)]
        return simple(body)

    prompts = ["fine", "cut", "hang", "event", "nonsense", "nothing", "fine"]
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, sometimes)
        run = await closed_loop(
            target(server, timeout=60.0), [{"prompt": prompt} for prompt in prompts], 1
        )
        nursery.cancel_scope.cancel()
    errors = [record.error for record in run.records]
    assert errors[0] == errors[6] == ""
    assert "not a valid answer" in errors[1]
    assert "TooSlowError" in errors[2]
    assert errors[3] == "the worker died"
    assert "not a valid answer" in errors[4]
    assert errors[5] == "the stream held no tokens"
    figures = figures_of(run)
    assert (figures.completed, figures.failed, figures.completion_tokens) == (2, 5, 6)


async def test_a_refusal_is_recorded_with_its_status_and_body(autojump_clock: Any) -> None:
    record = await one(lambda _: [(0.0, b'{"error": "no such model"}')], status=404)
    assert record.error == 'HTTP 404: {"error": "no such model"}'


async def test_a_server_that_is_not_there_is_recorded() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        record = await send(Target(connect=over_tcp(address), path="/", fields={}), {})
    assert "OSError" in record.error


async def test_over_tcp_reaches_a_real_socket() -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, lambda _: [(0.0, text("a") + usage(1, 1) + DONE)])
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, server._serve, [listener])
        address = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        record = await send(Target(connect=over_tcp(address), path="/x", fields={}), {})
        nursery.cancel_scope.cancel()
    assert (record.text, record.error) == ("a", "")
    assert server.requests[0][0].target == b"/x"


@pytest.mark.parametrize("address", ["https://127.0.0.1:1", "127.0.0.1:80", "http://"])
def test_addresses_that_are_not_http_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        over_tcp(address)


async def test_a_loop_without_work_is_refused() -> None:
    nowhere = Target(connect=over_tcp("http://127.0.0.1:1"), path="/", fields={})
    with pytest.raises(ValueError, match="needs requests"):
        await closed_loop(nowhere, [], 1)
    with pytest.raises(ValueError, match="concurrency"):
        await closed_loop(nowhere, [{}], 0)


# -- figures alone


def record(times: list[float], tokens: int | None) -> Record:
    return Record(
        started=0.0, chunks=times, first_text=times[0], prompt_tokens=1, completion_tokens=tokens
    )


def test_one_token_requests_have_no_tpot() -> None:
    run = Run(concurrency=2, records=[record([0.1], 1), record([0.1, 0.3], 3)], duration=1.0)
    assert figures_of(run).tpot_ms.mean == pytest.approx(100)


def test_percentiles_are_linear_between_ranks() -> None:
    run = Run(concurrency=1, records=[record([t / 1000], 2) for t in range(1, 102)], duration=1.0)
    ttft = figures_of(run).ttft_ms
    assert (ttft.mean, ttft.p50, ttft.p90, ttft.p99) == pytest.approx((51, 51, 91, 100))


def test_a_server_that_counts_nothing_gives_no_figures() -> None:
    with pytest.raises(ValueError, match="no token counts"):
        figures_of(Run(concurrency=1, records=[record([0.1], None)], duration=1.0))


def test_a_run_of_failures_has_no_times() -> None:
    failed = Record(started=0.0, error="HTTP 500")
    figures: Figures = figures_of(Run(concurrency=1, records=[failed], duration=2.0))
    assert (figures.completed, figures.failed, figures.output_tokens_per_second) == (0, 1, 0)
    assert math.isnan(figures.ttft_ms.p50)
