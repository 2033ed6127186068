"""The end of a server: draining, cutting off requests that don't finish, and cancellation."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
import trio
import trio.testing

from tests.support.h2_client import h2_client
from tests.support.http_stub import (
    Running,
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
from trioserve.http.server import server as server_module
from trioserve.http.server.server import FINAL_GRACE
from trioserve.protocol.errors import ShuttingDown
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
WHOLE = json.dumps({"prompt": "x"}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
A = Chunk("a", (97,))
LAST_CHUNK = b"\r\n0\r\n\r\n"


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.05)


async def ends(server: Running, within: float = 25.0) -> None:
    with trio.fail_after(within):
        await server.ended.wait()


async def test_what_runs_is_finished() -> None:
    go_on = trio.Event()
    stub = StubEngine(script=lambda _: [A, go_on, *words("b")])
    async with running(stub) as server, await connect(server.url) as client:
        await client.send_all(raw_request(STREAM, path=TEXT))
        await read_until(client, b'"text":"a"')
        server.shutdown.set()
        await settled()
        assert not server.ended.is_set()
        go_on.set()
        assert (await read_to_end(client)).endswith(b"data: [DONE]\n\n" + LAST_CHUNK)
        await ends(server)
        with pytest.raises(OSError, match="connect"):
            await connect(server.url)
    assert server.num_cut == 0


async def test_who_asks_while_it_drains_is_told() -> None:
    """Over new connections and over those that were there, which serve nothing else afterwards."""
    stub = StubEngine(script=lambda _: [A, math.inf])
    async with running(stub, shutdown_timeout=60) as server:
        busy, idle = await connect(server.url), await connect(server.url)
        await busy.send_all(raw_request(STREAM, path=TEXT))
        await read_until(busy, b'"text":"a"')
        await idle.send_all(HEALTH)
        assert b"Connection" not in await read_until(idle, b'"ok"}')
        server.shutdown.set()
        await settled()
        for client in (idle, await connect(server.url)):
            await client.send_all(HEALTH)
            answer = await read_to_end(client)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert answer.endswith(b'{"status":"draining"}')
            assert b"\r\nconnection: close\r\n" in answer.lower()
        refused = await connect(server.url)
        await refused.send_all(raw_request(WHOLE, path=TEXT))
        answer = await read_to_end(refused)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
        assert b"\r\nconnection: close\r\n" in answer.lower()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "draining"
        assert not server.ended.is_set()


async def test_new_requests_on_an_open_http2_connection_are_refused() -> None:
    stub = StubEngine(script=lambda _: [A, math.inf])
    async with running(stub, shutdown_timeout=60) as server, h2_client(server.url) as client:
        client.post(TEXT, STREAM)
        await client.flush()
        while not stub.calls:
            await trio.sleep(0.01)
        server.shutdown.set()
        await settled()
        refused = client.post(TEXT, WHOLE)
        await client.flush()
        status, content = await client.response(refused)
        assert status == "503"
        assert json.loads(content)["error"]["code"] == "draining"


async def test_requests_that_come_late_do_not_draw_the_end_out() -> None:
    go_on = trio.Event()
    stub = StubEngine(script=lambda _: [A, go_on, *words("b")])
    async with running(stub, shutdown_timeout=60) as server:
        client = await connect(server.url)
        await client.send_all(raw_request(STREAM, path=TEXT))
        await read_until(client, b'"text":"a"')
        early = await connect(server.url)
        await early.send_all(raw_request(WHOLE, path=TEXT)[:-1])
        await settled()
        server.shutdown.set()
        await settled()
        # Their bodies never come, so they are neither served nor refused.
        late = await connect(server.url)
        await late.send_all(raw_request(WHOLE, path=TEXT)[:-1])
        await settled()
        go_on.set()
        await ends(server, FINAL_GRACE + 30)
    assert server.num_cut == 0


async def test_idle_connections_are_closed_where_nothing_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "FINAL_GRACE", 60.0)
    async with running(StubEngine()) as server, await connect(server.url) as client:
        await client.send_all(HEALTH)
        await read_until(client, b'"ok"}')
        async with await connect(server.url) as silent:
            await settled()
            server.shutdown.set()
            with trio.fail_after(25):
                assert await read_to_end(client) == b""
                assert await read_to_end(silent) == b""
            await ends(server)


class TestCutOff:
    """Requests that still run when ``shutdown_timeout`` is over."""

    async def test_a_stream_ends_with_an_event_that_says_why(self) -> None:
        stub = StubEngine(script=lambda _: [A, math.inf])
        with captured_logs() as logs:
            async with running(stub, shutdown_timeout=0.2) as server:
                async with await connect(server.url) as client:
                    await client.send_all(raw_request(STREAM, path=TEXT))
                    await read_until(client, b'"text":"a"')
                    started = trio.current_time()
                    server.shutdown.set()
                    answer = await read_to_end(client)
                    await ends(server)
                    assert trio.current_time() - started >= 0.2
        assert answer.endswith(b"}}\n\n" + LAST_CHUNK)
        (event,) = [part for part in answer.split(b"\r\n") if part.startswith(b"data: {")]
        assert json.loads(event.removeprefix(b"data: "))["error"] == {
            "message": "time is up",
            "type": "service_unavailable_error",
            "param": None,
            "code": "shutting_down",
        }
        assert server.num_cut == 1
        assert stub.calls[0].left.is_set()
        assert [(line["status"], line["reason"]) for line in logs] == [(200, "shutting_down")]

    async def test_an_answer_that_was_not_begun_is_a_503(self) -> None:
        stub = StubEngine(script=lambda _: [A, math.inf])
        async with running(stub, shutdown_timeout=0.1) as server:
            async with await connect(server.url) as client:
                await client.send_all(raw_request(WHOLE, path=TEXT))
                while not stub.calls:
                    await trio.sleep(0.01)
                server.shutdown.set()
                answer = await read_to_end(client)
            await ends(server)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
        assert b"\r\nconnection: close\r\n" in answer.lower()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"

    async def test_an_http2_stream_ends_with_its_event(self) -> None:
        stub = StubEngine(script=lambda _: [A, math.inf])
        async with running(stub, shutdown_timeout=0.1) as server:
            async with h2_client(server.url) as client:
                stream_id = client.post(TEXT, STREAM)
                await client.flush()
                while not stub.calls:
                    await trio.sleep(0.01)
                server.shutdown.set()
                status, content = await client.response(stream_id)
            await ends(server)
        assert status == "200"
        assert b'"code":"shutting_down"' in content.split(b"\n\n")[-2]

    async def test_openais_client_raises_an_error_of_its_own(self) -> None:
        stub = StubEngine(script=lambda _: [A, math.inf])
        async with running(stub, shutdown_timeout=0.1) as server:

            def read() -> None:
                with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
                    for _ in client.completions.create(model="stub", prompt="x", stream=True):
                        trio.from_thread.run_sync(server.shutdown.set)

            with pytest.raises(openai.APIError, match="time is up") as caught:
                await trio.to_thread.run_sync(read)
            assert caught.value.code == "shutting_down"
            await ends(server)

    async def test_the_time_is_bounded_beside_those_who_do_not_read(self) -> None:
        flood = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]
        stub = StubEngine(script=lambda call: flood if call is stub.calls[0] else [A, math.inf])
        options = {"shutdown_timeout": 0.1, "send_timeout": 600.0}
        async with running(stub, **options) as server:
            async with await connect(server.url) as stalled, await connect(server.url) as client:
                await stalled.send_all(raw_request(STREAM, path=TEXT))
                await read_until(stalled, b"aaa")
                await client.send_all(raw_request(STREAM, path=TEXT))
                await read_until(client, b'"text":"a"')
                server.shutdown.set()
                with trio.fail_after(25):
                    answer = await read_to_end(client)
                # It would lack its end, had it waited for clients that don't read.
                assert answer.endswith(b"}}\n\n" + LAST_CHUNK)
                await ends(server, FINAL_GRACE + 30)
        assert server.num_cut == 2


Leave = Callable[[trio.Nursery], Awaitable[None]]


async def by_cancel(nursery: trio.Nursery) -> None:
    nursery.cancel_scope.cancel()


async def by_deadline(nursery: trio.Nursery) -> None:
    nursery.cancel_scope.deadline = trio.current_time()


async def by_error(nursery: trio.Nursery) -> None:
    async def fail() -> None:
        raise LookupError("a sibling's")

    nursery.start_soon(fail)


@pytest.mark.parametrize("leave", [by_cancel, by_deadline, by_error])
async def test_a_server_that_is_cancelled_ends_its_streams(
    leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as a slow machine takes for fifty.
    monkeypatch.setattr(server_module, "CANCELLED_GRACE", 30.0)
    stub = StubEngine(script=lambda _: [A, math.inf])
    answers: list[bytes] = []
    config = server_config()

    def cut() -> None:
        stub.abort_all(ShuttingDown("the server is shutting down"))

    async def serve(task_status: Any) -> None:
        app = create_app(as_engine(stub), config)
        await serve_app(app, config, on_drain=stub.drain, on_cut=cut, task_status=task_status)
        raise AssertionError("a server that was cancelled returned")

    async def read(client: trio.SocketStream) -> None:
        answers.append(await read_to_end(client))

    async with trio.open_nursery() as readers:
        caught: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                (url,) = await nursery.start(serve)
                for _ in range(50):
                    client = await connect(url)
                    await client.send_all(raw_request(STREAM, path=TEXT))
                    await read_until(client, b'"text":"a"')
                    readers.start_soon(read, client)
                await leave(nursery)
        except* LookupError as group:
            caught = group.exceptions[0]
        with pytest.raises(OSError, match="connect"):
            await connect(url)
    assert (caught is not None) == (leave is by_error)
    assert len(answers) == 50
    for answer in answers:
        assert b'"code":"shutting_down"' in answer
        assert answer.endswith(b"}}\n\n" + LAST_CHUNK)


async def test_the_port_is_free_afterwards() -> None:
    async with running(StubEngine()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        server.shutdown.set()
        await ends(server)
    async with served(StubEngine(), port=port) as url:
        assert url.endswith(f":{port}")
        async with http_client(url) as client:
            assert (await client.get("/health")).status_code == 200
