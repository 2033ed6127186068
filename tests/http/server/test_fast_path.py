"""Events that are written as they come: what is in the way of that, and what must not change."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import attrs
import h11
import pytest
import trio
import trio.testing

from tests.support.h2_client import H2Client, h2_client
from tests.support.http_stub import (
    Call,
    StubEngine,
    app_of,
    captured_logs,
    connect,
    raw_request,
    read_until,
    served,
    server_config,
)
from tests.support.tls_certificates import make_authority
from trioserve.http.api.openai.completions.writer import CompletionWriter
from trioserve.http.server import connection as connection_module
from trioserve.http.server.connection import Connection
from trioserve.http.server.connections import Connections
from trioserve.http.server.server import serve_app
from trioserve.http.server.settings import server_settings
from trioserve.http.server.unsent import UnsentBudget
from trioserve.protocol.errors import SlowReader
from trioserve.requests.generation import GenerationStream
from trioserve.requests.stream import Chunk, Stream

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = json.dumps({"prompt": "x", "stream": True}).encode()


@attrs.define(eq=False)
class PushedEngine(StubEngine):
    """The test pushes what comes out, into the streams that requests have."""

    streams: list[Stream] = attrs.field(factory=list)

    @contextlib.asynccontextmanager
    async def _generation(self, call: Call) -> AsyncIterator[GenerationStream]:
        request = self._request(call)
        self.streams.append(request.stream)
        try:
            yield GenerationStream(request)
        finally:
            request.stream.discard()
            call.left.set()

    def end(self, index: int = 0) -> None:
        self.streams[index].push(Chunk("", finish_reason="stop"))
        self.streams[index].close()


class Writes:
    """Counts writes, and lets each of them take only so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 30) -> None:
        self.most = most
        self.pieces: list[bytes] = []
        self._write = os.write
        monkeypatch.setattr(connection_module.os, "write", self)

    def __call__(self, descriptor: int, data: bytes) -> int:
        self.pieces.append(data)
        if not self.most:
            raise BlockingIOError
        return self._write(descriptor, data[: self.most])


class Steps(trio.abc.Instrument):
    """Counts how often tasks run."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


def texts_of(body: bytes) -> list[str]:
    """Return the texts of a completion's events."""
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part[:1] == b"d"]
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


async def begun(engine: PushedEngine, url: str, body: bytes = BODY) -> trio.SocketStream:
    """Return a client with a stream that has begun."""
    client = await connect(url)
    await client.send_all(raw_request(body, path=TEXT))
    await read_until(client, b"\r\n\r\n")
    await trio.testing.wait_all_tasks_blocked(0.01)
    return client


async def body_of(client: trio.SocketStream) -> bytes:
    """Return the rest of a chunked body, as h11 parses it."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await client.receive_some())
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body


async def test_an_event_is_one_write_and_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PushedEngine()
    async with served(engine) as url, await begun(engine, url) as client:
        writes, steps = Writes(monkeypatch), Steps()
        await first_chunk(engine, client)
        writes.pieces.clear()
        trio.lowlevel.add_instrument(steps)
        for number in range(100):
            engine.streams[0].push(Chunk(f"{number} ", (number,)))
        trio.lowlevel.remove_instrument(steps)
        assert (len(writes.pieces), steps.count) == (100, 0)
        assert engine.streams[0].pending_bytes == 0
        engine.end()
        texts = texts_of(await body_of(client))
    assert texts == [*(f"{number} " for number in range(100)), ""]


async def first_chunk(engine: PushedEngine, client: trio.SocketStream) -> None:
    """Send the first chunk of a choice the long way, whatever it is."""
    engine.streams[0].push(Chunk("first", (1,)))
    await read_until(client, b"\n\n\r\n")
    await trio.testing.wait_all_tasks_blocked(0.01)


@pytest.mark.parametrize("most", [0, 1, 100])
async def test_what_a_write_leaves_over_comes_first(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep later bytes waiting behind a full buffer, and behind writes that end within an event."""
    engine = PushedEngine()
    async with served(engine) as url, await begun(engine, url) as client:
        engine.streams[0].push(Chunk("0 ", (0,)))
        await trio.testing.wait_all_tasks_blocked(0.01)
        Writes(monkeypatch, most)
        for number in range(1, 50):
            engine.streams[0].push(Chunk(f"{number} ", (number,)))
            if number % 10 == 0:
                await trio.testing.wait_all_tasks_blocked(0.01)
        engine.end()
        assert "".join(texts_of(await body_of(client))) == "".join(f"{n} " for n in range(50))


async def test_with_tls_an_event_is_made_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There every piece waits its turn: what the short way refused would be made again."""
    authority = make_authority(tmp_path / "ca")
    certificate, key = authority.issue("server")
    trust = ssl.create_default_context(cafile=authority.file)
    made: list[str] = []
    make = CompletionWriter.text

    def text(writer: CompletionWriter, chunk: Chunk) -> bytes | None:
        made.append(chunk.text)
        return make(writer, chunk)

    monkeypatch.setattr(CompletionWriter, "text", text)
    engine = PushedEngine()
    async with served(engine, ssl_certfile=certificate, ssl_keyfile=key) as url:
        transport = await connect(url.replace("https", "http"))
        async with trio.SSLStream(transport, trust, server_hostname="127.0.0.1") as client:
            await client.send_all(raw_request(BODY, path=TEXT))
            while b"\r\n\r\n" not in await client.receive_some():
                pass
            for word in ("a", "b", "c"):
                await trio.testing.wait_all_tasks_blocked(0.01)
                engine.streams[0].push(Chunk(word, (1,)))
                assert b'"text":"%b"' % word.encode() in await client.receive_some()
            assert made == ["a", "b", "c"]
            engine.end()
            while b"[DONE]" not in await client.receive_some():
                pass


async def test_a_slow_reader_finds_everything_in_order() -> None:
    """Past what the system buffers, events wait in the bounded stream and are merged there."""
    engine = PushedEngine()
    async with served(engine) as url, await begun(engine, url) as client:
        pushed = ""
        for number in range(2000):
            text = f"{number} " + "x" * 50_000
            engine.streams[0].push(Chunk(text, (number,)))
            pushed += text
            await trio.testing.wait_all_tasks_blocked()
            if engine.streams[0].pending_bytes > 500_000:
                break
        else:
            raise AssertionError("all of it was buffered")
        engine.end()
        texts = texts_of(await body_of(client))
    assert "".join(texts) == pushed
    assert len(texts) < number


async def test_a_reader_that_stalls_is_cut_off() -> None:
    engine = PushedEngine()
    with captured_logs() as logs:
        async with served(engine, send_timeout=0.2) as url, await begun(engine, url) as client:
            with trio.fail_after(20):
                while not engine.calls[0].left.is_set():
                    with contextlib.suppress(SlowReader):
                        engine.streams[0].push(Chunk("x" * 50_000, (1,)))
                    await trio.sleep(0.005)
            await client.aclose()
            while not logs:
                await trio.sleep(0.01)
    assert (logs[-1]["status"], logs[-1]["reason"]) == (499, "slow_reader")


async def test_comments_come_only_into_silence() -> None:
    engine = PushedEngine()
    async with served(engine, keep_alive_interval=1.0) as url, await begun(engine, url) as client:
        for _ in range(6):
            engine.streams[0].push(Chunk("x", (1,)))
            await trio.sleep(0.2)
        # At least one: a machine that is busy may come late to this, and to the end.
        await trio.sleep(1.25)
        engine.end()
        body = await body_of(client)
    before, comment, after = body.partition(b": keep-alive\n\n")
    assert texts_of(before) == ["x"] * 6
    assert comment
    assert texts_of(after) == [""]


async def test_middleware_sees_every_piece() -> None:
    """Send messages to a wrapped ``send``, although the server below is ours."""
    engine = PushedEngine()
    app = app_of(engine)

    async def shouting(scope: Any, receive: Any, send: Any) -> None:
        async def send_loudly(message: Any) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": message["body"].upper()}
            await send(message)

        await app(scope, receive, send_loudly)

    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, shouting, server_config())
        async with await begun(engine, url) as client:
            for _ in range(3):
                engine.streams[0].push(Chunk("quiet", (1,)))
                await trio.testing.wait_all_tasks_blocked(0.01)
            engine.end()
            assert (await body_of(client)).count(b"QUIET") == 3
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_of_either_version(version: str) -> None:
    """HTTP/1.0 has no chunks: there the body ends with the connection."""
    engine = PushedEngine()
    request = raw_request(BODY, path=TEXT, close=True).replace(
        b"HTTP/1.1", b"HTTP/" + version.encode()
    )
    async with served(engine) as url, await connect(url) as client:
        await client.send_all(request)
        await read_until(client, b"\r\n\r\n")
        for word in ("a", "b", "c"):
            await trio.testing.wait_all_tasks_blocked(0.01)
            engine.streams[0].push(Chunk(word, (1,)))
        engine.end()
        body = b""
        while part := await client.receive_some():
            body += part
    assert (b"\r\n" in body) == (version == "1.1")
    assert [
        text for text in (b'"text":"a"', b'"text":"b"', b'"text":"c"') if text not in body
    ] == []


class TestHTTP2:
    async def _begin(self, engine: PushedEngine, client: H2Client, count: int = 1) -> list[int]:
        ids = [client.post(TEXT, BODY) for _ in range(count)]
        await client.flush()
        while len(engine.streams) < count:
            await trio.sleep(0.005)
        await trio.testing.wait_all_tasks_blocked(0.01)
        return ids

    async def test_an_event_is_one_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = PushedEngine()
        async with served(engine) as url, h2_client(url) as client:
            (stream_id,) = await self._begin(engine, client)
            engine.streams[0].push(Chunk("first", (1,)))
            await trio.testing.wait_all_tasks_blocked(0.01)
            writes = Writes(monkeypatch)
            for number in range(20):
                engine.streams[0].push(Chunk(f"{number} ", (number,)))
            assert len(writes.pieces) == 20
            engine.end()
            status, body = await client.response(stream_id)
        assert status == "200"
        assert texts_of(body) == ["first", *(f"{number} " for number in range(20)), ""]

    @pytest.mark.parametrize("most", [0, 1, 100])
    async def test_streams_side_by_side_while_writes_end_within_frames(
        self, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = PushedEngine()
        async with served(engine) as url, h2_client(url) as client:
            first, second = await self._begin(engine, client, 2)
            Writes(monkeypatch, most)
            for number in range(60):
                engine.streams[number % 2].push(Chunk(f"{number} ", (number,)))
                if number % 7 == 0:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            engine.end(0)
            engine.end(1)
            bodies = {first: b"", second: b""}
            ended = 0
            async with contextlib.aclosing(client.events()) as events:
                async for event in events:
                    name = type(event).__name__
                    if name == "DataReceived":
                        bodies[event.stream_id] += event.data
                    ended += name == "StreamEnded"
                    if ended == 2:
                        break
        joined = ["".join(texts_of(bodies[each])) for each in (first, second)]
        assert joined == ["".join(f"{n} " for n in range(rest, 60, 2)) for rest in (0, 1)]

    async def test_past_the_window_events_wait(self) -> None:
        """65,535 bytes may leave before the client lets more through."""
        engine = PushedEngine()
        async with served(engine) as url, h2_client(url) as client:
            (stream_id,) = await self._begin(engine, client)
            pushed = ""
            for number in range(30):
                text = f"{number} " + "x" * 4000
                engine.streams[0].push(Chunk(text, (number,)))
                pushed += text
                await trio.testing.wait_all_tasks_blocked()
            assert engine.streams[0].pending_bytes > 0
            engine.end()
            _, body = await client.response(stream_id)
        assert "".join(texts_of(body)) == pushed


async def test_a_closed_connection_writes_to_nobody_else() -> None:
    """Write nothing to the next socket, which gets the number of the closed one."""
    ours, theirs = trio.socket.socketpair()
    connection = Connection(
        cast(Any, None),
        server_settings(server_config()),
        cast(Any, None),
        trio.SocketStream(ours),
        Connections(),
        UnsentBudget(1 << 20),
    )
    number = ours.fileno()
    connection.abort()
    others = [socket.socketpair() for _ in range(3)]
    try:
        assert number in [end.fileno() for pair in others for end in pair]
        with contextlib.suppress(AssertionError):  # There is no task that would send the rest.
            connection.send_now(b"secret")
        for pair in others:
            for end in pair:
                end.setblocking(False)
                with pytest.raises(BlockingIOError):
                    end.recv(1)
    finally:
        for pair in others:
            for end in pair:
                end.close()
        theirs.close()
