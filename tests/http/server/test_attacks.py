"""Attacks that harm a plain hypercorn, and don't harm this server.

The first group of tests shows that the attacks are real: each of them harms hypercorn's own
``serve`` with the same application. The others have harmed other versions of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from tests.support.h2_client import h2_client
from tests.support.http_stub import (
    StubEngine,
    as_engine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    read_to_end,
    read_until,
    served,
    server_config,
    standstill,
    words,
)
from trioserve.http import create_app, serve_app
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
FLOOD = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]

Attack = Callable[[str], Awaitable[None]]


async def data_after_an_early_answer(url: str) -> None:
    async with h2_client(url) as client:
        stream_id = client.request("POST", TEXT, end=False)
        client.connection.send_data(stream_id, b" " * 10_000)
        await client.flush()
        await trio.sleep(0.05)
        with contextlib.suppress(trio.BrokenResourceError):
            client.connection.send_data(stream_id, b" " * 100)
            await client.flush()
        await trio.sleep(0.05)


async def connect_without_a_path(url: str) -> None:
    async with h2_client(url) as client:
        client.request("CONNECT", None)
        await client.flush()
        await read_to_end(client.stream)


async def path_beyond_ascii(url: str) -> None:
    async with h2_client(url) as client:
        client.request("GET", "/é")
        await client.flush()
        with contextlib.suppress(AssertionError):
            await client.response(1)


async def websocket_with_trailing_bytes(url: str) -> None:
    async with await connect(url) as client:
        await client.send_all(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            b"trailing bytes"
        )
        await trio.sleep(0.1)


async def bad_chunk(url: str) -> None:
    async with await connect(url) as client:
        await client.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\nnonsense\r\n"
        )
        await read_to_end(client)


async def bad_chunk_in_the_middle_of_an_answer(url: str) -> None:
    async with await connect(url) as client:
        head = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send_all(head + b"1\r\nx\r\n")
        await read_until(client, b"\r\n\r\n")
        with contextlib.suppress(trio.BrokenResourceError):
            await client.send_all(b"zz\r\nnonsense\r\n")
        await read_to_end(client)


async def settings_of_an_upgrade_that_are_none(url: str) -> None:
    async with await connect(url) as client:
        await client.send_all(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: a\r\n\r\n"
        )
        await trio.sleep(0.05)


async def target_without_a_path(url: str) -> None:
    async with await connect(url) as client:
        await client.send_all(b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await trio.sleep(0.05)


async def priority_of_a_stream_on_itself(url: str) -> None:
    async with h2_client(url) as client:
        await client.flush()
        await client.stream.send_all(priority_frame(stream_id=1, on=1))
        await client.stream.send_all(priority_frame(stream_id=3, on=5))
        await trio.sleep(0.05)


async def garbage(url: str) -> None:
    async with await connect(url) as client:
        await client.send_all(os.urandom(4096) + b"\r\n\r\n")
        await read_to_end(client)


def priority_frame(*, stream_id: int, on: int) -> bytes:
    return bytes([0, 0, 5, 2, 0]) + stream_id.to_bytes(4, "big") + on.to_bytes(4, "big") + b"\x10"


ENDS_HYPERCORN = [
    data_after_an_early_answer,
    path_beyond_ascii,
    settings_of_an_upgrade_that_are_none,
    websocket_with_trailing_bytes,
]
OTHERS = [
    bad_chunk,
    bad_chunk_in_the_middle_of_an_answer,
    connect_without_a_path,
    garbage,
    priority_of_a_stream_on_itself,
    target_without_a_path,
]


@contextlib.asynccontextmanager
async def served_plainly(stub: StubEngine, **options: Any) -> AsyncIterator[str]:
    """Serve the application in hypercorn's own server."""
    settings = Config()
    settings.bind = ["127.0.0.1:0"]
    app: Any = create_app(as_engine(stub), server_config(**options))
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(functools.partial(serve, app, settings))
        yield url
        nursery.cancel_scope.cancel()


@pytest.fixture
def quiet_hypercorn() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet_hypercorn")
class TestPlainHypercorn:
    @pytest.mark.parametrize("attack", ENDS_HYPERCORN)
    async def test_one_client_ends_it(self, attack: Attack) -> None:
        with pytest.raises(BaseExceptionGroup):
            async with served_plainly(StubEngine(), max_body_size=1000) as url:
                await attack(url)
                await trio.sleep(30)

    async def test_a_pipelined_request_hides_that_the_client_has_gone(self) -> None:
        assert not await notices(served_plainly, b"\r\n", within=1.0)

    async def test_a_stalled_reader_holds_up_cancellation(self) -> None:
        client: trio.SocketStream | None = None
        ended = trio.Event()

        async def run() -> None:
            nonlocal client
            stub = StubEngine(script=lambda _: list(FLOOD))
            async with served_plainly(stub) as url:
                client = await stalled_reader(url, stub)
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            with trio.move_on_after(2) as patience:
                await ended.wait()
            assert patience.cancelled_caught
            assert client is not None
            await client.aclose()

    async def test_what_a_window_keeps_piles_up(self) -> None:
        assert await tokens_taken_from_an_engine(served_plainly, most=50) >= 50


@pytest.mark.parametrize("attack", [*ENDS_HYPERCORN, *OTHERS])
async def test_no_client_ends_the_server(attack: Attack) -> None:
    stub = StubEngine(script=lambda _: [Chunk("a", (97,)), 0.15, *words("b")])
    with captured_logs() as logs:
        async with served(stub, max_body_size=1000) as url, await connect(url) as bystander:
            await bystander.send_all(raw_request(STREAM, path=TEXT))
            await read_until(bystander, b'"text":"a"')
            with trio.fail_after(20):
                await attack(url)
            await read_until(bystander, b"[DONE]")
            async with http_client(url) as client:
                assert (await client.get("/health")).status_code == 200
    assert "a connection was dropped" not in [entry["event"] for entry in logs]


@pytest.mark.parametrize("more", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent(more: bytes) -> None:
    assert await notices(served, more)


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_client_that_closes_its_half_has_gone(admitted: bool) -> None:
    """Waiting for admission, and between two events."""
    never = trio.Event()
    stub = StubEngine(
        script=lambda _: [Chunk("a", (97,)), math.inf],
        admit=None if admitted else lambda _: never.wait(),
    )
    async with served(stub) as url, await connect(url) as client:
        await client.send_all(raw_request(STREAM, path=TEXT))
        while not stub.calls:
            await trio.sleep(0.01)
        if admitted:
            await read_until(client, b'"text":"a"')
        await client.send_eof()
        with trio.fail_after(20):
            await stub.calls[0].left.wait()


async def test_a_client_that_leaves_behind_a_full_queue_of_its_bodys_pieces() -> None:
    left = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await go_on.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    go_on = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = functools.partial(serve_app, app, server_config())
        (url,) = await nursery.start(serving)
        async with await connect(url) as client:
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            await client.send_all(head + b"1\r\nx\r\n" * 1000)
            await trio.sleep(0.05)
        await trio.sleep(0.05)
        go_on.set()
        with trio.fail_after(20):
            await left.wait()
        nursery.cancel_scope.cancel()


async def test_a_stalled_reader_does_not_hold_up_cancellation() -> None:
    stub = StubEngine(script=lambda _: list(FLOOD))
    with trio.fail_after(20):
        async with served(stub, send_timeout=60.0) as url:
            client = await stalled_reader(url, stub)
    await client.aclose()


async def test_what_a_window_keeps_is_bounded() -> None:
    assert await tokens_taken_from_an_engine(served, most=50) < 10


async def notices(server: Any, more: bytes, within: float = 20.0) -> bool:
    """Return whether a server aborts a request within so many seconds of its client's leaving."""
    stub = StubEngine(script=lambda _: [math.inf])
    with captured_logs():
        async with server(stub) as url:
            async with await connect(url) as client:
                await client.send_all(raw_request(STREAM, path=TEXT) + more)
                while not stub.calls:
                    await trio.sleep(0.01)
            with trio.move_on_after(within):
                await stub.calls[0].left.wait()
            return stub.calls[0].left.is_set()


async def stalled_reader(url: str, stub: StubEngine) -> trio.SocketStream:
    """Return a client of a stream that has stopped reading, once the system's buffers are full."""
    client = await connect(url)
    await client.send_all(raw_request(STREAM, path=TEXT))
    await read_until(client, b"aaa")
    await standstill(stub)
    return client


async def tokens_taken_from_an_engine(server: Any, most: int) -> int:
    """Return the tokens that a server takes for an HTTP/2 client with a closed window.

    It counts until the server stands still or has taken ``most``. A token is 100,000 bytes.
    """
    stub = StubEngine(script=lambda _: list(FLOOD))
    with captured_logs():
        async with server(stub) as url, h2_client(url) as client:
            client.post(TEXT, STREAM)
            await client.flush()
            taken, before = 0, 0
            while taken < most and (taken == 0 or taken > before):
                await trio.sleep(0.3)
                before = taken
                if stub.calls and stub.calls[0].stream is not None:
                    taken = stub.calls[0].stream.usage.completion_tokens
            return taken
