"""HTTP/2 over real sockets: what is wrong with one stream stays with it, and floods are ended."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import h2.events
import h2.exceptions
import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes

from tests.support.h2_client import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    H2Client,
    frame,
    get,
    h2_client,
    request_head,
)
from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    read_to_end,
    read_until,
    served,
    server_config,
    words,
)
from trioserve.http import serve_app
from trioserve.http.server.connection import CONNECTION_STATE
from trioserve.http.server.settings import MAX_HEAD_SIZE, MAX_STREAMS
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
WHOLE = json.dumps({"prompt": "x"}).encode()
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
FLOOD = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]


async def error_of(client: H2Client, stream_id: int) -> ErrorCodes | int | None:
    """Return the error that reset one stream, or ended the connection; None if it just ended."""
    async with contextlib.aclosing(client.events()) as events:
        async for event in events:
            if isinstance(event, h2.events.ConnectionTerminated):
                return event.error_code
            if isinstance(event, h2.events.StreamReset) and event.stream_id == stream_id:
                return event.error_code
    return None


@contextlib.asynccontextmanager
async def raw_client(url: str, data: bytes) -> AsyncIterator[trio.SocketStream]:
    """Return a client that has sent its preface and ``data``."""
    async with await connect(url) as client:
        await client.send_all(PREFACE + frame(SETTINGS) + data)
        yield client


async def goodbye(client: trio.SocketStream) -> int | None:
    """Return the error with which the server ends a connection; None if it gives none."""
    got = bytearray(await read_to_end(client))
    while len(got) >= 9:
        end = 9 + int.from_bytes(got[:3], "big")
        if got[3] == GOAWAY:
            return got[end - 1]
        del got[:end]
    return None


@contextlib.asynccontextmanager
async def bystander(url: str) -> AsyncIterator[None]:
    """Run another client's request through the block, and check that it is answered to its end."""
    async with await connect(url) as client:
        await client.send_all(raw_request(STREAM, path=TEXT))
        await read_until(client, b'"text":"a"')
        yield
        async with http_client(url) as other:
            assert (await other.get("/health")).status_code == 200
        await read_until(client, b"[DONE]")


def beside_a_bystander() -> StubEngine:
    """Answer its first request after a while, and the others never."""

    def script(call: Any) -> list[Any]:
        first = call is stub.calls[0]
        return [Chunk("a", (97,)), *([0.2, *words("b")] if first else [math.inf])]

    stub = StubEngine(script=script)
    return stub


async def test_a_stream() -> None:
    async with served(StubEngine()) as url, h2_client(url) as client:
        stream_id = client.post(TEXT, STREAM)
        await client.flush()
        status, content = await client.response(stream_id)
    assert status == "200"
    assert content.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_resets_its_stream() -> None:
    stub = StubEngine(script=lambda _: [Chunk("a", (97,)), math.inf])
    async with served(stub) as url, h2_client(url) as client:
        stream_id = client.post(TEXT, STREAM)
        await client.flush()
        while not stub.calls:
            await trio.sleep(0.01)
        client.connection.reset_stream(stream_id)
        await client.flush()
        with trio.fail_after(20):
            await stub.calls[0].left.wait()


@pytest.mark.parametrize("length", [b"", b"Content-Length: 2\r\n"])
async def test_a_connection_is_not_upgraded(length: bytes) -> None:
    """Refuse an upgrade, which would bypass the rules of a proxy in front."""
    async with served(StubEngine()) as url, await connect(url) as client:
        await client.send_all(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" + length + b"\r\n{}"
        )
        assert (await read_until(client, b'"ok"}')).startswith(b"HTTP/1.1 200")


class TestStalledStreams:
    async def test_what_waits_for_a_window_is_bounded_and_then_reset(self) -> None:
        stub = StubEngine(script=lambda call: list(FLOOD) if call is stub.calls[0] else words("a"))
        async with served(stub, send_timeout=0.3) as url, h2_client(url) as client:
            stalled = client.post(TEXT, STREAM)
            await client.flush()
            status, _ = await client.response(stalled, acknowledge=False)
            assert status == "reset"
            call = stub.calls[0]
            await call.left.wait()
            assert call.stream is not None
            assert call.stream.usage.completion_tokens < 10
            # The connection's window is used up by what the client didn't acknowledge.
            client.connection.increment_flow_control_window(1 << 20)
            other = client.post(TEXT, STREAM)
            await client.flush()
            assert (await client.response(other))[0] == "200"

    async def test_a_trickle_is_as_good_as_nothing(self) -> None:
        stub = StubEngine(script=lambda _: list(FLOOD))
        async with served(stub, send_timeout=0.5) as url, h2_client(url) as client:
            stalled = client.post(TEXT, STREAM)
            await client.flush()

            async def trickle() -> None:
                while True:
                    await trio.sleep(0.1)
                    client.connection.increment_flow_control_window(1)
                    client.connection.increment_flow_control_window(1, stalled)
                    await client.flush()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trickle)
                with trio.fail_after(20):
                    status, _ = await client.response(stalled, acknowledge=False)
                nursery.cancel_scope.cancel()
        assert status == "reset"

    async def test_nothing_of_a_reset_stream_is_kept(self) -> None:
        connections = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            connections.append(scope["state"][CONNECTION_STATE])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            part = {"type": "http.response.body", "body": b"a" * 60_000, "more_body": True}
            await send(part)
            await send(part)

        async with _serving(app, send_timeout=0.1) as url, h2_client(url) as client:
            streams = [client.request("GET", "/") for _ in range(10)]
            await client.flush()
            num_reset = 0
            async with contextlib.aclosing(client.events()) as events:
                async for event in events:
                    num_reset += isinstance(event, h2.events.StreamReset)
                    if num_reset == len(streams):
                        break
            protocol = connections[0]._protocol.protocol
            while protocol.streams or protocol.stream_buffers:
                await trio.sleep(0.01)


class TestLimits:
    async def test_a_stream_too_many_is_refused_and_the_others_go_on(self) -> None:
        stub = StubEngine(script=lambda _: [math.inf])
        async with served(stub) as url, h2_client(url) as client:
            client.connection.update_settings({})
            client.connection.remote_settings.max_concurrent_streams = 1000
            client.connection.remote_settings.acknowledge()
            streams = [client.post(TEXT, STREAM) for _ in range(MAX_STREAMS + 1)]
            await client.flush()
            assert await error_of(client, streams[-1]) is ErrorCodes.REFUSED_STREAM
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(stub.calls) == MAX_STREAMS
            client.connection.reset_stream(streams[0])
            again = client.request("GET", "/health")
            await client.flush()
            assert await client.response(again) == ("200", b'{"status":"ok"}')

    async def test_an_answered_request_counts_while_its_client_still_sends_it(self) -> None:
        async with served(StubEngine()) as url, raw_client(url, b"") as client:
            ids = range(1, 2 * MAX_STREAMS + 3, 2)
            for stream_id in ids:
                await client.send_all(get(stream_id, end=False, path="/"))
                await trio.testing.wait_all_tasks_blocked()
            refused = frame(RST_STREAM, bytes([0, 0, 0, 7]), stream_id=ids[-1])
            await read_until(client, refused)

    @pytest.mark.parametrize("path", ["/\u00e9", "", "health", "http://x/health", "*"], ids=ascii)
    async def test_a_path_that_is_none_resets_its_own_stream_alone(self, path: str) -> None:
        stub = StubEngine(script=lambda _: [0.3, *words("a")])
        async with served(stub) as url, h2_client(url) as client:
            good = client.post(TEXT, STREAM)
            bad = client.request("GET", path)
            await client.flush()
            code = await error_of(client, bad)
            if path:  # h2 itself ends the connection where there is none.
                assert code is ErrorCodes.PROTOCOL_ERROR
                assert (await client.response(good))[0] == "200"

    async def test_a_large_head(self) -> None:
        async with served(StubEngine()) as url, h2_client(url) as client:
            stream_id = client.connection.get_next_available_stream_id()
            headers = [
                (":method", "GET"),
                (":scheme", "http"),
                (":authority", "localhost"),
                (":path", "/"),
            ]
            # Half of it by reference to what was sent before: small on the wire.
            headers += [("x", "a" * 4000)] * (MAX_HEAD_SIZE // 4000 + 1)
            client.connection.send_headers(stream_id, headers, end_stream=True)
            await client.flush()
            assert await error_of(client, stream_id) is ErrorCodes.ENHANCE_YOUR_CALM


class TestBrokenRules:
    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (get(2), ErrorCodes.PROTOCOL_ERROR),
            (get(5) + get(3), None),
            (get(1) + frame(DATA, b"x", stream_id=1), None),
            (frame(DATA, b"x", stream_id=7), None),
            (frame(DATA, b"x"), ErrorCodes.PROTOCOL_ERROR),
            (frame(CONTINUATION, b"x", flags=4, stream_id=1), None),
            (frame(HEADERS, request_head(), stream_id=1) + frame(PING, bytes(8)), None),
            (frame(HEADERS, b"\xff" * 20, flags=5, stream_id=1), None),
            (frame(SETTINGS, b"12345"), None),
            (frame(PING, b"1"), None),
            (bytes([255, 255, 255]) + frame(DATA, stream_id=1)[3:], ErrorCodes.FRAME_SIZE_ERROR),
            (frame(WINDOW_UPDATE, bytes(4)), ErrorCodes.PROTOCOL_ERROR),
            (frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff") * 2, ErrorCodes.FLOW_CONTROL_ERROR),
            (frame(5, bytes(8), stream_id=1), None),
            (frame(7, bytes(8)), None),
        ],
    )
    async def test_at_most_the_clients_own_connection_ends(
        self, data: bytes, code: ErrorCodes | None
    ) -> None:
        with captured_logs() as logs:
            async with served(beside_a_bystander()) as url, bystander(url):
                async with raw_client(url, data) as client:
                    said = None
                    with trio.move_on_after(20 if code is not None else 0.1):
                        said = await goodbye(client)
        assert said == code or code is None
        assert "a connection was dropped" not in [entry["event"] for entry in logs]

    async def test_a_window_past_all_measure_resets_its_own_stream(self) -> None:
        async with served(beside_a_bystander()) as url, bystander(url):
            async with h2_client(url) as client:
                stream_id = client.post(TEXT, STREAM)
                await client.flush()
                await client.stream.send_all(
                    frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff", stream_id=stream_id)
                )
                assert await error_of(client, stream_id) is ErrorCodes.FLOW_CONTROL_ERROR
                other = client.request("GET", "/health")
                await client.flush()
                assert (await client.response(other))[0] == "200"

    async def test_trailers(self) -> None:
        async with served(StubEngine()) as url, h2_client(url) as client:
            stream_id = client.request("POST", TEXT, end=False)
            client.connection.send_data(stream_id, WHOLE)
            client.connection.send_headers(stream_id, [("x", "y")], end_stream=True)
            await client.flush()
            assert (await client.response(stream_id))[0] == "200"

    async def test_an_application_that_leaves_in_the_middle_of_its_answer(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})

        async with _serving(app) as url, h2_client(url) as client:
            stream_id = client.request("GET", "/")
            await client.flush()
            assert await error_of(client, stream_id) is ErrorCodes.INTERNAL_ERROR


class TestSlowness:
    @pytest.mark.parametrize(
        "data",
        [b"", frame(SETTINGS), frame(SETTINGS) + frame(HEADERS, request_head(), stream_id=1)],
    )
    async def test_a_client_that_asks_for_nothing(self, data: bytes) -> None:
        async with served(StubEngine(), request_timeout=0.3) as url, await connect(url) as client:
            await client.send_all(PREFACE + data)
            with trio.fail_after(20):
                await read_to_end(client)

    async def test_a_body_that_trickles(self) -> None:
        async with served(StubEngine(), request_timeout=0.4) as url, h2_client(url) as client:
            stream_id = client.request("POST", TEXT, end=False)
            await client.flush()

            async def trickle() -> None:
                with contextlib.suppress(h2.exceptions.StreamClosedError):
                    while True:
                        client.connection.send_data(stream_id, b" ")
                        await client.flush()
                        await trio.sleep(0.05)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trickle)
                with trio.fail_after(20):
                    assert (await client.response(stream_id))[0] == "408"
                nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _serving(app: Any, **options: Any) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(functools.partial(serve_app, app, server_config(**options)))
        yield url
        nursery.cancel_scope.cancel()
