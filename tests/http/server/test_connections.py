"""Connections: their number, their eviction, and the resources of those that have ended."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.h2_client import h2_client
from tests.support.http_stub import (
    StubEngine,
    as_engine,
    captured_logs,
    connect,
    raw_request,
    read_to_end,
    read_until,
    served,
    server_config,
    standstill,
    words,
)
from trioserve.http import create_app
from trioserve.http.api import bodies
from trioserve.http.server import server
from trioserve.http.server.connections import (
    MAX_CONNECTIONS,
    BoundedListener,
    Connections,
    connection_limit,
    raise_descriptor_limit,
)
from trioserve.http.server.server import serve_app
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
WHOLE = json.dumps({"prompt": "x"}).encode()
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
FLOOD = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: 3)


@pytest.fixture
def descriptors() -> Any:
    """Lets a test set the limit of open files, and puts it back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class TestLimit:
    def test_it_leaves_room_for_what_else_is_open(self, descriptors: Any) -> None:
        descriptors(1024)
        assert connection_limit() == 1024 - 128
        descriptors(200)
        assert connection_limit() == 100

    def test_it_is_raised_as_far_as_is_of_use(self, descriptors: Any) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors(256)
        raise_descriptor_limit()
        assert connection_limit() == min(MAX_CONNECTIONS, most - 128)
        descriptors(most)
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most

    @pytest.mark.usefixtures("room_for_three")
    async def test_who_asks_for_nothing_has_to_go(self) -> None:
        async with served(StubEngine()) as url, contextlib.AsyncExitStack() as stack:
            used = await stack.enter_async_context(await connect(url))
            await used.send_all(HEALTH)
            await read_until(used, b'"ok"}')
            silent = await stack.enter_async_context(await connect(url))
            await trio.testing.wait_all_tasks_blocked(0.01)
            begun = await stack.enter_async_context(await connect(url))
            await begun.send_all(HEALTH[:5])
            await trio.testing.wait_all_tasks_blocked(0.01)
            for unlucky in (used, silent, begun):
                other = await stack.enter_async_context(await connect(url))
                await other.send_all(HEALTH)
                with trio.fail_after(20):
                    await read_until(other, b'"ok"}')
                    assert await read_to_end(unlucky) == b""

    @pytest.mark.usefixtures("room_for_three")
    async def test_who_is_served_stays_and_others_wait(self) -> None:
        never = trio.Event()
        stub = StubEngine(admit=lambda _: never.wait())
        async with served(stub) as url, contextlib.AsyncExitStack() as stack:
            busy = [await stack.enter_async_context(await connect(url)) for _ in range(3)]
            for client in busy:
                await client.send_all(raw_request(WHOLE, path=TEXT))
            while len(stub.calls) < 3:
                await trio.sleep(0.01)
            waiting = await stack.enter_async_context(await connect(url))
            await waiting.send_all(HEALTH)
            with trio.move_on_after(0.2) as patience:
                await waiting.receive_some()
            assert patience.cancelled_caught
            await busy[0].aclose()
            with trio.fail_after(20):
                await read_until(waiting, b'"ok"}')

    async def test_no_descriptors_are_left(
        self, descriptors: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Retry accepting without haste, and serve waiting clients in the end."""
        async with served(StubEngine()) as url:
            address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
            clients = [trio.socket.socket() for _ in range(20)]
            try:
                descriptors(max(int(name) for name in os.listdir("/proc/self/fd")) + 3)
                spare = []
                with contextlib.suppress(OSError):
                    while True:
                        spare.append(os.dup(0))
                started = trio.current_time()
                for client in clients:
                    await client.connect(address)
                    await client.send(HEALTH)
                await trio.sleep(0.3)
                # Ten times a second at most.
                most = 2 + 10 * (trio.current_time() - started)
                assert 1 <= len(caplog.records) <= most
                assert {record.name for record in caplog.records} == {"trio.serve_listeners"}
                for descriptor in spare:
                    os.close(descriptor)
                resource.setrlimit(
                    resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
                )
                with trio.fail_after(20):
                    for client in clients:
                        assert (await client.recv(1000)).startswith(b"HTTP/1.1 200")
            finally:
                for client in clients:
                    client.close()


class TestMemory:
    @pytest.mark.parametrize("http2", [False, True])
    async def test_stalled_readers_hold_little(self, http2: bool) -> None:
        """Produce only as much of an endless stream as the system and one send take."""
        stub = StubEngine(script=lambda _: list(FLOOD))
        async with served(stub) as url, contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                if http2:
                    h2 = await stack.enter_async_context(h2_client(url))
                    h2.post(TEXT, STREAM)
                    await h2.flush()
                else:
                    client = await stack.enter_async_context(await connect(url))
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                    await client.send_all(raw_request(STREAM, path=TEXT))
            produced = await standstill(stub, 5)
        # Of 100,000 bytes each; how many the system takes is its own matter.
        assert max(produced) < (5 if http2 else 500)


def body_in(room: bodies.BodyBudget, address: str = "") -> bodies.Body:
    body = bodies.Body(None, None)
    body.room, body.address = room, address
    return body


class TestBodies:
    async def test_all_that_come_in_have_room_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bodies, "_ROOM", 3000)
        config = server_config(max_body_size=700)
        app = create_app(as_engine(StubEngine()), config)
        padded = WHOLE + b" " * (700 - len(WHOLE))
        request = raw_request(padded, path=TEXT)
        async with trio.open_nursery() as nursery, contextlib.AsyncExitStack() as stack:
            (url,) = await nursery.start(serve_app, app, config)
            slow = []
            for number in range(1, 5):
                slow.append(await stack.enter_async_context(await connect(url)))
                await slow[-1].send_all(request[:-1])
                while app.body_room.held < number * 699:
                    await trio.sleep(0.01)
            other = await stack.enter_async_context(await connect(url))
            await other.send_all(request)
            assert b"HTTP/1.1 200" in await read_until(other, b'"choices"')
            # The oldest made way.
            assert b"HTTP/1.1 429" in await read_until(slow[0], b"bodies of requests")
            while app.body_room.held > 3 * 699:
                await trio.sleep(0.01)
            for client in slow[1:]:
                await client.send_all(b" ")
                assert b"HTTP/1.1 200" in await read_until(client, b'"choices"')
            while app.body_room.held:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    def test_bodies_that_have_come_whole_keep_their_room(self) -> None:
        room = bodies.BodyBudget(100)
        whole, partial, last = (body_in(room) for _ in range(3))
        whole.append(b"x" * 60)
        whole.set_complete()
        partial.append(b"x" * 30)
        last.append(b"x" * 30)
        assert room.held == 90
        # The other one that is being received has made way, and now nothing can.
        assert partial.is_refused
        assert not last.is_refused
        last.append(b"x" * 11)
        assert last.is_refused
        assert not whole.is_refused
        whole.release()
        assert room.held == 0

    def test_the_address_that_holds_the_most_makes_way(self) -> None:
        room = bodies.BodyBudget(100)
        first = body_in(room, "192.0.2.1")
        greedy = [body_in(room, "192.0.2.2") for _ in range(2)]
        first.append(b"x" * 40)
        for each in greedy:
            each.append(b"x" * 30)
        body_in(room, "192.0.2.3").append(b"x" * 10)
        assert [each.is_refused for each in (first, *greedy)] == [False, True, False]

    async def test_what_was_read_is_given_back(self) -> None:
        stub = StubEngine(script=lambda _: [math.inf])
        app = create_app(as_engine(stub), server_config())
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(serve_app, app, server_config())
            async with await connect(url) as client:
                request = raw_request(STREAM, path=TEXT)
                await client.send_all(request[:-1])
                while app.body_room.held < len(STREAM) - 1:
                    await trio.sleep(0.01)
                assert app.body_room.held == len(STREAM) - 1
                await client.send_all(request[-1:])
                while not stub.calls:
                    await trio.sleep(0.01)
                assert app.body_room.held == 0
                await client.send_all(request[:-1])
            with trio.fail_after(20):
                await stub.calls[0].left.wait()
            assert app.body_room.held == 0
            nursery.cancel_scope.cancel()


class TestLeftovers:
    async def test_nothing_is_left_of_clients_that_leave_at_any_moment(self) -> None:
        """In the middle of a head, of a body, waiting, between two events: each a few times."""
        never = trio.Event()

        def script(call: Any) -> list[Any]:
            return [*words("a"), math.inf]

        stub = StubEngine(
            script=script, admit=lambda call: never.wait() if len(stub.calls) % 2 else _nothing()
        )
        request = raw_request(STREAM, path=TEXT)
        with captured_logs() as logs:
            async with _counted(stub) as (url, tasks):
                await _visit(url, request)
                await trio.testing.wait_all_tasks_blocked(0.05)
                gc.collect()
                tasks_before, files_before = tasks(), num_descriptors()
                for end in range(0, len(request) + 1, 4):
                    await _visit(url, request[:end])
                    await _visit(url, request + b"\r\n" + request[:end])
                with trio.fail_after(20):
                    for call in stub.calls:
                        await call.left.wait()
                    while tasks() > tasks_before or num_descriptors() > files_before:
                        await trio.sleep(0.01)
        assert "a connection was dropped" not in [entry["event"] for entry in logs]
        assert len(stub.calls) > 20

    async def test_many_at_once(self) -> None:
        stub = StubEngine(script=lambda _: [*words("a"), math.inf])
        async with _counted(stub) as (url, tasks):
            await trio.testing.wait_all_tasks_blocked(0.05)
            tasks_before, files_before = tasks(), num_descriptors()
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(_visit, url, raw_request(STREAM, path=TEXT), True)
            with trio.fail_after(20):
                for call in stub.calls:
                    await call.left.wait()
                while tasks() > tasks_before or num_descriptors() > files_before:
                    await trio.sleep(0.01)
        assert len(stub.calls) == 200


async def _nothing() -> None:
    pass


async def _visit(url: str, data: bytes, wait: bool = False) -> None:
    async with await connect(url) as client:
        await client.send_all(data)
        if wait:
            await read_until(client, b'"a"')
        else:
            await trio.sleep(0.002)


@contextlib.asynccontextmanager
async def _counted(stub: StubEngine) -> AsyncIterator[tuple[str, Any]]:
    """Return a server, and a function that counts the tasks in it."""
    config = server_config()

    def count(nursery: trio.Nursery) -> int:
        num = 0
        nurseries = [nursery]
        while nurseries:
            for task in nurseries.pop().child_tasks:
                num += 1
                nurseries.extend(task.child_nurseries)
        return num

    async with trio.open_nursery() as nursery:
        app = create_app(as_engine(stub), config)
        (url,) = await nursery.start(serve_app, app, config)
        yield url, functools.partial(count, nursery)
        nursery.cancel_scope.cancel()


async def test_clients_who_come_together_are_accepted_together() -> None:
    """Accept them in one turn of the event loop, and not more of them than allowed."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    (beneath,) = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=100)
    address = beneath.socket.getsockname()
    with contextlib.ExitStack() as stack, contextlib.closing(Connections(limit=60)) as connections:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(80)]
        listener = BoundedListener(beneath, connections)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            accepted = [await listener.accept() for _ in range(60)]
            nursery.cancel_scope.cancel()
        assert turns < 20
        names = {stream.socket.getpeername() for stream in accepted}
        assert names == {client.getsockname() for client in clients[:60]}
        for stream in accepted:
            await stream.aclose()
        await listener.accept()
        await listener.aclose()
        # A socket that was accepted and not returned is closed, and its client sees it.
        for client in clients[61:]:
            client.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
