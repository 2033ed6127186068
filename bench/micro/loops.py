"""Cases that need an event loop or sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import cast

import trio
import trio.testing
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.worker_context import WorkerContext

from bench.micro.cases import Prepared, make_request
from bench.servers import tokenizer
from trioserve.http.api.openai.completions.writer import CompletionWriter, Wanted
from trioserve.http.server.connection import Connection
from trioserve.http.server.connections import Connections
from trioserve.http.server.settings import ServerSettings
from trioserve.http.server.unsent import UnsentBudget
from trioserve.requests.generation import GenerationStream
from trioserve.requests.stream import Chunk, Stream, StreamBudget
from trioserve.text.tokenizer import Tokenizer

_CHUNK = Chunk(" lighthouse", (17,))


@contextlib.asynccontextmanager
async def stream_fan_out(rows: int) -> AsyncIterator[Prepared]:
    """Push a chunk to as many readers, tasks that wait at their streams, until all have it."""
    budget = StreamBudget(1 << 30, 1 << 40)
    streams = [Stream(budget) for _ in range(rows)]
    missing = 0
    all_have_it = trio.Event()

    async def read(stream: Stream) -> None:
        nonlocal missing
        while True:
            await stream.take()
            missing -= 1
            if not missing:
                all_have_it.set()

    async def run() -> None:
        nonlocal missing, all_have_it
        missing, all_have_it = rows, trio.Event()
        for stream in streams:
            stream.push(_CHUNK)
        await all_have_it.wait()

    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(read, stream)
        await trio.testing.wait_all_tasks_blocked()
        yield Prepared(run)
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def server_sent_events(rows: int) -> AsyncIterator[Prepared]:
    """Make an event of a chunk for as many connections, and write it to their sockets."""
    settings, budget = ServerSettings(), UnsentBudget(1 << 40)
    connections, writers, clients = [], [], []
    every, wanted = Connections(), Wanted(tokenizer=Tokenizer(tokenizer(), None))
    # Neither is called: nothing is read from these connections.
    app, context = cast(ASGIWrapper, None), cast(WorkerContext, None)
    for _ in range(rows):
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        clients.append(theirs)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        connections.append(Connection(app, settings, context, stream, every, budget))
        writers.append(_writer(wanted))

    def before() -> None:
        for client in clients:
            with contextlib.suppress(BlockingIOError):
                while client.recv(1 << 16):
                    pass

    def run() -> None:
        for writer, connection in zip(writers, connections, strict=True):
            data = writer.text(_CHUNK)
            assert data is not None
            sent = connection.send_now(data)
            assert sent

    try:
        yield Prepared(run, before)
    finally:
        for client in clients:
            client.close()
        for connection in connections:
            await connection._stream.aclose()
        every.close()


def _writer(wanted: Wanted) -> CompletionWriter:
    request = make_request([7], StreamBudget(0, 0))
    writer = CompletionWriter(
        id="cmpl-0123456789abcdef",
        model="smollm2-135m",
        created=1,
        include_usage=False,
        prompts=[request.prompt],
        wanted=wanted,
    )
    writer.start([GenerationStream(request)])
    writer.chunk(0, _CHUNK)
    return writer
