"""The server over real sockets: what one client does stays with it, and the end is orderly."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from hypercorn.trio.worker_context import WorkerContext

from tests.support.http_stub import (
    StubEngine,
    as_engine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    read_to_end,
    read_until,
    running,
    served,
    server_config,
    words,
)
from trioserve.http import create_app, serve_app
from trioserve.http.server import protocol
from trioserve.http.server.connection import Connection
from trioserve.http.server.connections import Connections
from trioserve.http.server.http1 import HTTP1
from trioserve.http.server.server import CANCELLED_GRACE, FINAL_GRACE
from trioserve.http.server.settings import ServerSettings
from trioserve.http.server.unsent import UnsentBudget
from trioserve.protocol.errors import TrioserveError
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}
FLOOD = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]


async def test_a_connections_exception_is_logged_and_goes_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(HTTP1):
        async def _handle_events(self) -> None:
            raise RuntimeError("a bug")

    monkeypatch.setattr(protocol, "HTTP1", Broken)
    with captured_logs() as logs:
        async with served(StubEngine()) as url:
            async with await connect(url) as client:
                await client.send_all(b"anything")
                assert await read_to_end(client) == b""
    (entry,) = [entry for entry in logs if entry["event"] == "a connection was dropped"]
    assert "a bug" in repr(entry["error"])


class TestStalledReaders:
    async def test_one_is_cut_off_after_the_send_timeout(self) -> None:
        stub = StubEngine(script=lambda _: list(FLOOD))
        with captured_logs() as logs:
            async with served(stub, send_timeout=0.3) as url, await connect(url) as client:
                started = trio.current_time()
                await client.send_all(raw_request(STREAM, path=TEXT))
                while not stub.calls:
                    await trio.sleep(0.01)
                with trio.fail_after(20):
                    await stub.calls[0].left.wait()
                assert trio.current_time() - started >= 0.3
                while not logs:
                    await trio.sleep(0.01)
        (line,) = logs
        assert (line["status"], line["reason"]) == (499, "slow_reader")

    async def test_one_that_reads_slowly_is_not(self) -> None:
        stub = StubEngine(script=lambda _: [*FLOOD[:60], *words("end")])
        async with served(stub, send_timeout=2.0) as url, await connect(url) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            await client.send_all(raw_request(STREAM, path=TEXT, close=True))
            size = 0
            started = trio.current_time()
            while part := await client.receive_some(1 << 17):
                size += len(part)
                if trio.current_time() - started < 2.5:
                    await trio.sleep(0.05)
        assert size > 60 * 100_000

    async def test_shutdown_does_not_wait_for_one(self) -> None:
        stub = StubEngine(script=lambda _: list(FLOOD))
        options = {"send_timeout": 60.0, "shutdown_timeout": 0.1}
        async with running(stub, **options) as server, await connect(server.url) as client:
            await client.send_all(raw_request(STREAM, path=TEXT))
            await read_until(client, b"aaa")
            server.shutdown.set()
            with trio.fail_after(FINAL_GRACE + 30):
                await server.ended.wait()
        assert stub.calls[0].left.is_set()
        assert server.num_cut == 1

    async def test_cancellation_does_not_wait_for_one(self) -> None:
        stub = StubEngine(script=lambda _: list(FLOOD))
        started = trio.current_time()
        async with served(stub, send_timeout=60.0) as url:
            client = await connect(url)
            await client.send_all(raw_request(STREAM, path=TEXT))
            await read_until(client, b"aaa")
        assert trio.current_time() - started < CANCELLED_GRACE + 30
        await client.aclose()


class TestListening:
    async def test_an_address_in_use_is_one_line(self) -> None:
        async with served(StubEngine()) as url:
            port = int(url.rsplit(":", 1)[1])
            with pytest.raises(TrioserveError) as caught:
                await _serve_briefly(port=port)
        assert str(caught.value) == f"can't listen on 127.0.0.1:{port}: the address is in use"

    async def test_an_unknown_host(self) -> None:
        with pytest.raises(TrioserveError, match=r"can't listen on 256\.0\.0\.1:0: "):
            await _serve_briefly(host="256.0.0.1")

    async def test_a_unix_socket(self, tmp_path: Path) -> None:
        path = str(tmp_path / "s")
        async with served(StubEngine(), uds=path) as url:
            assert url == f"unix:{path}"
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with http_client("http://x", transport=transport) as client:
                assert (await client.get("/health")).json() == {"status": "ok"}
            with pytest.raises(TrioserveError, match="the address is in use"):
                await _serve_briefly(uds=path)
        assert not os.path.exists(path)

    async def test_a_socket_file_that_was_left_behind(self, tmp_path: Path) -> None:
        path = str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        async with served(StubEngine(), uds=path) as url:
            assert url == f"unix:{path}"

    async def test_a_file_that_is_no_socket_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        path.write_text("precious")
        with pytest.raises(TrioserveError, match="there is a file that is no socket"):
            await _serve_briefly(uds=str(path))
        assert path.read_text() == "precious"

    async def test_a_client_that_leaves_a_unix_socket(self, tmp_path: Path) -> None:
        path = str(tmp_path / "s")
        stub = StubEngine(script=lambda _: [math.inf])
        async with served(stub, uds=path):
            client = await trio.open_unix_socket(path)
            await client.send_all(raw_request(STREAM, path=TEXT) + b"\r\n")
            await read_until(client, b"\r\n\r\n")
            await client.aclose()
            with trio.fail_after(20):
                await stub.calls[0].left.wait()


async def _serve_briefly(**options: Any) -> None:
    config = server_config(**options)
    with trio.fail_after(20):
        await serve_app(create_app(as_engine(StubEngine()), config), config)


async def test_an_application_that_does_not_start() -> None:
    config = server_config()
    app = create_app(as_engine(StubEngine()), config)

    @app.before_serving
    async def fail() -> None:
        raise RuntimeError("no disk")

    with (
        captured_logs(),
        pytest.raises(TrioserveError, match=r"the application failed: .*no disk"),
    ):
        await serve_app(app, config)


@pytest.mark.parametrize("reads", [False, True])
async def test_an_answer_before_the_body_was_read(reads: bool) -> None:
    """More of the body than the application's queue holds is under way when it answers and ends."""
    piece = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    answer = trio.Event()
    ended = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if reads:
            await receive()
        await answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"early"})
        ended.set()

    config = server_config()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(functools.partial(serve_app, app, config))
        async with await connect(url) as client:
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            await client.send_all(head + piece * 30)
            await trio.sleep(0.05)
            answer.set()
            with trio.fail_after(20):
                await read_until(client, b"early")
                await ended.wait()
            await client.send_all(piece * 30)
        nursery.cancel_scope.cancel()


async def test_a_connection_that_can_not_be_watched() -> None:
    class Broken(Connections):
        def add(self, descriptor: int, connection: Connection) -> None:
            raise OSError("too many watches")

    connections = Broken()
    ours, theirs = socket.socketpair()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    with captured_logs() as logs, contextlib.closing(connections), theirs:
        await Connection(
            None,  # type: ignore[arg-type]
            ServerSettings(),
            WorkerContext(None),
            stream,
            connections,
            UnsentBudget(1 << 20),
        ).run()
        assert theirs.recv(1) == b""
    assert [str(entry["error"]) for entry in logs] == ["too many watches"]


async def test_in_somebody_elses_hypercorn() -> None:
    from hypercorn.config import Config
    from hypercorn.trio import serve

    settings = Config()
    settings.bind = ["127.0.0.1:0"]
    stub = StubEngine()
    app: Any = create_app(as_engine(stub))
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(functools.partial(serve, app, settings))
        async with http_client(url) as client:
            response = await client.post(TEXT, content=STREAM)
            upgraded = await client.get(TEXT, headers=WEBSOCKET)
        assert response.text.endswith("data: [DONE]\n\n")
        assert upgraded.status_code == 400
        assert "websocket" in upgraded.json()["error"]["message"]
        nursery.cancel_scope.cancel()
