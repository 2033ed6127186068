"""HTTP/1.1 over real sockets: what can't be read, what could be read in two ways, and slowness."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import trio

from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    read_to_end,
    read_until,
    served,
)
from trioserve.http.server.http1 import MAX_HEADERS, path_of
from trioserve.http.server.settings import MAX_HEAD_SIZE
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
WHOLE = json.dumps({"prompt": "x"}).encode()
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


async def answer(data: bytes) -> tuple[int, bytes]:
    """Status and all bytes that come back for ``data``, sent at once to a server of its own."""
    with captured_logs():
        async with served(StubEngine(), max_body_size=1000) as url, await connect(url) as client:
            with contextlib.suppress(trio.BrokenResourceError):
                await client.send_all(data)
            with trio.fail_after(20):
                got = await read_to_end(client)
    return int(got.split(b" ", 2)[1]), got


def get(*lines: bytes, target: bytes = b"/health", version: bytes = b"HTTP/1.1") -> bytes:
    head = [b"GET " + target + b" " + version, b"Host: localhost", b"Connection: close", *lines]
    return b"\r\n".join(head) + b"\r\n\r\n"


TWO_READINGS = {
    "a length beside chunks": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"
    ),
    "a length with a sign": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a space before a colon": get(b"Transfer-Encoding : chunked"),
    "a folded line": get(b"X: a\r\n b"),
    "a line without a carriage return": get(b"X: a\nY: b"),
    "a head without carriage returns": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "a carriage return inside": get(b"X: a\rY: b"),
    "a chunk with another end": CHUNKED + b"1\r\nxyz0\r\n\r\n",
    "a chunk's size with a sign": CHUNKED + b"+1\r\nx\r\n0\r\n\r\n",
    "a NUL": get(b"X: a\0b"),
    "two hosts": get(b"Host: y"),
}
UNREADABLE = {
    "no request line": b"\r\n\r\n",
    "an old version": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a target with a NUL": get(target=b"/\0"),
    "a target beyond ASCII": get(target=b"/\xff"),
    "a target that is no path": get(target=b"health"),
    "a target for a proxy": b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no target": b"GET  HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bytes of TLS": bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + b"\r\n\r\n" * 50,
}


@pytest.mark.parametrize("data", [*TWO_READINGS.values(), *UNREADABLE.values()], ids=str)
async def test_what_can_not_be_read_in_one_way_is_a_400(data: bytes) -> None:
    status, got = await answer(data)
    assert status == 400
    assert b"connection: close" in got.lower()
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"


@pytest.mark.parametrize("version", [b"HTTP/9.9", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9"])
async def test_another_version_is_a_505(version: bytes) -> None:
    assert (await answer(get(version=version)))[0] == 505


async def test_an_unknown_transfer_encoding_is_a_501() -> None:
    assert (await answer(CHUNKED.replace(b"chunked", b"gzip")))[0] == 501


@pytest.mark.parametrize(
    "data",
    [
        get(b"X: " + b"a" * (2 * MAX_HEAD_SIZE)),
        b"GET /" + b"a" * (2 * MAX_HEAD_SIZE),
        get(target=b"/" + b"a" * (2 * MAX_HEAD_SIZE)),
        get(*[b"a:b"] * (MAX_HEADERS + 1)),
        get(*[b"a:b"] * 10_000),
    ],
    ids=["one long header", "a line without end", "a long target", "one too many", "10,000"],
)
async def test_a_large_head_is_a_431(data: bytes) -> None:
    assert (await answer(data))[0] == 431


async def test_as_many_headers_as_there_may_be() -> None:
    assert (await answer(get(*[b"a: b"] * (MAX_HEADERS - 2))))[0] == 200


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/health?x=1", b"/health?x=1"),
        (b"http://x/health", b"/health"),
        (b"HTTPS://x:1/health?a", b"/health?a"),
        (b"http://x", b"/"),
        (b"http://x?a", b"/?a"),
        (b"http://[", b"/"),
        (b"*", None),
        (b"x:1", None),
        (b"", None),
        (b"/\xe9", None),
    ],
)
def test_the_path_of_a_target(target: bytes, path: bytes | None) -> None:
    assert path_of(target) == path


async def test_a_target_with_a_host() -> None:
    assert (await answer(get(target=b"http://elsewhere/health")))[0] == 200


@pytest.mark.parametrize(
    ("method", "status"),
    [(b"HEAD", 200), (b"OPTIONS", 405), (b"TRACE", 405), (b"BREW", 405), (b"get", 200)],
)
async def test_other_methods(method: bytes, status: int) -> None:
    got = await answer(method + get()[3:])
    assert got[0] == status


async def test_an_error_in_a_heads_version_is_told_without_a_body_where_none_may_be() -> None:
    status, got = await answer(b"HEAD" + get(version=b"HTTP/9.9")[3:])
    assert (status, got.partition(b"\r\n\r\n")[2]) == (505, b"")


class TestContinue:
    async def test_a_client_that_waits_is_told_to_go_on(self) -> None:
        async with served(StubEngine()) as url, await connect(url) as client:
            head, _, body = raw_request(WHOLE, path=TEXT, close=True).partition(b"\r\n\r\n")
            await client.send_all(head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert b"100" in await read_until(client, b"\r\n\r\n")
            await client.send_all(body)
            assert b"HTTP/1.1 200" in await read_to_end(client)

    async def test_not_with_a_body_that_is_too_large(self) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        status, _ = await answer(head + b"Content-Length: 1001\r\n\r\n")
        assert status == 413

    async def test_an_error_comes_first(self) -> None:
        head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        _, got = await answer(head + b"Content-Length: 10\r\n\r\n")
        assert b"HTTP/1.1 404" in got


class TestPipelining:
    async def test_all_are_answered_in_their_order(self) -> None:
        async with served(StubEngine()) as url, await connect(url) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send_all, HEALTH * 300 + get(target=b"/nowhere"))
                got = await read_to_end(client)
        assert got.count(b"HTTP/1.1 200") == 300
        assert got.rindex(b"HTTP/1.1 200") < got.index(b"HTTP/1.1 404")

    async def test_one_at_a_time_whatever_else_is_sent(self) -> None:
        stub = StubEngine(script=lambda _: [math.inf])
        async with served(stub) as url, await connect(url) as client:
            with trio.move_on_after(0.5) as scope:
                while True:  # More than both systems' buffers and ours hold together.
                    await client.send_all(raw_request(WHOLE, path=TEXT) * 1000)
            assert scope.cancelled_caught
            assert len(stub.calls) == 1


class TestSlowness:
    async def test_a_client_that_says_nothing(self) -> None:
        async with served(StubEngine(), request_timeout=0.3) as url, await connect(url) as client:
            started = trio.current_time()
            with trio.fail_after(20):
                assert await read_to_end(client) == b""
            assert trio.current_time() - started >= 0.2

    async def test_a_head_that_trickles(self) -> None:
        async with served(StubEngine(), request_timeout=0.5) as url, await connect(url) as client:
            with trio.fail_after(20):
                assert (await _trickle(client, HEALTH * 1000)).startswith(b"HTTP/1.1 408")

    async def test_a_head_has_its_time_from_its_first_byte(self) -> None:
        """And a connection that was used may be silent for longer than that before."""
        async with served(StubEngine(), request_timeout=1.5) as url, await connect(url) as client:
            await client.send_all(HEALTH)
            await read_until(client, b'"ok"}')
            await trio.sleep(1.6)
            await client.send_all(HEALTH[:10])
            await trio.sleep(0.1)
            await client.send_all(HEALTH[10:])
            await read_until(client, b'"ok"}')
            started = trio.current_time()
            with trio.fail_after(20):
                assert (await _trickle(client, HEALTH * 1000)).startswith(b"HTTP/1.1 408")
            assert trio.current_time() - started >= 1.5

    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_body_that_trickles(self, chunked: bool) -> None:
        length = b"Content-Length: 1000\r\n\r\n"
        head = (
            CHUNKED if chunked else raw_request(b"", path=TEXT).partition(b"Content-")[0] + length
        )
        piece = b"1\r\n \r\n" if chunked else b" "
        stub = StubEngine()
        async with served(stub, request_timeout=0.5) as url, await connect(url) as client:
            await client.send_all(head)
            with trio.fail_after(20):
                assert (await _trickle(client, piece * 1000, len(piece))).startswith(
                    b"HTTP/1.1 408"
                )
        assert not stub.calls

    async def test_an_answer_may_take_longer(self) -> None:
        stub = StubEngine(script=lambda _: [0.8, Chunk("a", (97,), finish_reason="stop")])
        async with served(stub, request_timeout=0.3) as url, http_client(url) as client:
            response = await client.post(TEXT, content=STREAM)
        assert response.text.endswith("[DONE]\n\n")


async def _trickle(client: trio.SocketStream, data: bytes, size: int = 1) -> bytes:
    """Send a few bytes every 50 ms until the server says something; what it says, to its end."""
    heard = b""

    async def listen() -> None:
        nonlocal heard
        heard = await client.receive_some()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        for start in range(0, len(data), size):
            await client.send_all(data[start : start + size])
            await trio.sleep(0.05)
    return heard
