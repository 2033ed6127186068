"""Scripted servers on memory streams, for tests of the load generator on virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import h11
import trio
import trio.testing

from trioserve.load import Target

__all__ = ["CUT", "DONE", "FakeServer", "Script", "event", "simple", "target", "text", "usage"]

Script = list[tuple[float, bytes]]
"""A server's script for one request: seconds to wait, then bytes of the body to send."""

CUT = b"<the connection breaks here>"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish_reason}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


@attrs.define
class FakeServer:
    """Serves memory streams with h11; ``script`` says how each request's body is answered."""

    nursery: trio.Nursery
    script: Callable[[dict[str, Any]], Script]
    status: int = 200
    close_after_each: bool = False
    tells: bool = True
    """True if the head of the answer announces the connection's end."""
    requests: list[tuple[h11.Request, dict[str, Any]]] = attrs.field(factory=list)
    connections: int = 0
    arrived: list[float] = attrs.field(factory=list)
    left: list[float] = attrs.field(factory=list)
    """Time at which it noticed, by writing, that a client had left during an answer."""
    active: int = 0
    most_active: int = 0

    async def connect(self) -> trio.abc.Stream:
        client, server = trio.testing.memory_stream_pair()
        self.connections += 1
        self.nursery.start_soon(self._serve, server)
        return client

    async def _serve(self, stream: trio.abc.Stream) -> None:
        http = h11.Connection(h11.SERVER)
        body = b""
        while True:
            received = http.next_event()
            if received is h11.NEED_DATA:
                http.receive_data(await stream.receive_some(4096))
            elif isinstance(received, h11.Request):
                request = received
            elif isinstance(received, h11.Data):
                body += bytes(received.data)
            elif isinstance(received, h11.EndOfMessage):
                asked = json.loads(body or b"{}")
                self.requests.append((request, asked))
                self.arrived.append(trio.current_time())
                try:
                    if not await self._answer(http, stream, asked):
                        return
                except trio.BrokenResourceError:
                    self.left.append(trio.current_time())
                    self.active -= 1
                    return
                if http.our_state is h11.MUST_CLOSE:  # as the client asked
                    await stream.aclose()
                    return
                body = b""
                http.start_next_cycle()
            elif isinstance(received, h11.ConnectionClosed):
                return

    async def _answer(
        self, http: h11.Connection, stream: trio.abc.Stream, body: dict[str, Any]
    ) -> bool:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        headers = [("transfer-encoding", "chunked")]
        if self.close_after_each and self.tells:
            headers.append(("connection", "close"))
        await stream.send_all(
            http.send(h11.Response(status_code=self.status, headers=headers)) or b""
        )
        for delay, data in self.script(body):
            await trio.sleep(delay)
            if data == CUT:
                await stream.aclose()
                return False
            await stream.send_all(http.send(h11.Data(data=data)) or b"")
        await stream.send_all(http.send(h11.EndOfMessage()) or b"")
        self.active -= 1
        if self.close_after_each:
            await stream.aclose()
        return not self.close_after_each


def simple(_: dict[str, Any]) -> Script:
    """Return a script: an empty first chunk after 1 s, three tokens at 2, 2.5 and 4.5 s."""
    return [
        (1.0, text("")),
        (1.0, text("a")),
        (0.5, text("b")),
        (2.0, text("c", "length")),
        (0.0, usage(7, 3)),
        (0.0, DONE),
    ]


def target(server: FakeServer, **options: Any) -> Target:
    return Target(
        connect=server.connect, path="/v1/completions", fields={"max_tokens": 3}, **options
    )
