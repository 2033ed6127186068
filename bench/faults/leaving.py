"""Clients that leave: at every stage of a request, in every manner that HTTP and TCP know."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any

import attrs
import h2.config
import h2.connection
import h2.events
import msgspec
import trio

STAGES = ("connected", "head", "body", "asked", "first event", "some events", "stalled")
"""How far a client goes before it leaves: half of the head sent, the head, half of the body, all of
the request; the first event read, a few of them; or nothing read for a while."""

MANNERS = ("fin", "rst", "half-close", "h2 rst_stream", "h2 goaway", "h2 close")
"""How it leaves: it closes, resets the connection, or closes its own half only; with HTTP/2 it
resets its stream, says that it goes, or just closes."""

_PATH = "/v1/completions"
_EVENT = b"data: "


@attrs.define(eq=False, kw_only=True)
class Visit:
    """One client: what it asks, when it leaves and how.

    ``patience`` is how long, in seconds, it reads nothing in the stage ``stalled``. ``left`` is the
    moment at which it left, on trio's clock; ``status`` what it was answered before, 0 for nothing.
    """

    port: int
    fields: Mapping[str, Any]
    stage: str
    manner: str
    events: int = 5
    patience: float = 0.5
    left: float = 0.0
    status: int = 0

    async def run(self) -> None:
        """Come, ask, and leave."""
        body = msgspec.json.encode({**self.fields, "stream": True})
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        try:
            if self.manner.startswith("h2"):
                await self._visit_h2(stream, body)
            else:
                await self._visit_h1(stream, body)
        except (trio.BrokenResourceError, OSError):
            # The server may close first: it refuses what it can't read.
            self.left = self.left or trio.current_time()
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _visit_h1(self, stream: trio.SocketStream, body: bytes) -> None:
        head = (
            f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        sent = {
            "connected": head[: len(head) // 2],
            "head": head,
            "body": head + body[: len(body) // 2],
        }
        await stream.send_all(sent.get(self.stage, head + body))
        await self._wait(stream, lambda data: data)
        self._leave_h1(stream)
        if self.manner == "half-close":
            # Who closes its own half may well read on; this one doesn't wait for the end.
            with trio.move_on_after(self.patience):
                while await stream.receive_some():
                    pass

    def _leave_h1(self, stream: trio.SocketStream) -> None:
        self.left = trio.current_time()
        if self.manner == "half-close":
            stream.socket.shutdown(socket.SHUT_WR)
            return
        if self.manner == "rst":
            linger = struct.pack("ii", 1, 0)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        stream.socket.close()

    async def _wait(self, stream: trio.SocketStream, content: Any) -> None:
        """Read, or don't, until it is time to leave; ``content`` makes bytes of what is read."""
        wanted = {"first event": 1, "some events": self.events}.get(self.stage, 0)
        if self.stage == "stalled":
            await trio.sleep(self.patience)
        seen = 0
        while seen < wanted:
            data = await stream.receive_some()
            if not data:
                return
            text = content(data)
            if not self.status and text.startswith(b"HTTP/1.1 "):
                self.status = int(text[9:12])
            seen += text.count(_EVENT)

    async def _visit_h2(self, stream: trio.SocketStream, body: bytes) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration())
        connection.initiate_connection()
        number = connection.get_next_available_stream_id()
        if self.stage != "connected":
            connection.send_headers(
                number,
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":authority", "localhost"),
                    (":path", _PATH),
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                ],
            )
        if self.stage == "body":
            connection.send_data(number, body[: len(body) // 2])
        elif self.stage not in ("connected", "head"):
            for start in range(0, len(body), 16384):
                connection.send_data(number, body[start : start + 16384])
            connection.end_stream(number)
        await stream.send_all(connection.data_to_send())

        def content(data: bytes) -> bytes:
            return self._content_of(connection, data)

        await self._wait(stream, content)
        self.left = trio.current_time()
        if self.manner == "h2 rst_stream" and self.stage != "connected":
            connection.reset_stream(number)
        elif self.manner == "h2 goaway":
            connection.close_connection()
        if self.manner != "h2 close":
            await stream.send_all(connection.data_to_send())
            # Its connection stays for a moment, as a browser's does.
            await trio.sleep(self.patience / 10)

    def _content_of(self, connection: h2.connection.H2Connection, data: bytes) -> bytes:
        content = b""
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.status = int(dict(event.headers or ())[b":status"])
            elif isinstance(event, h2.events.DataReceived):
                content += event.data or b""
                connection.acknowledge_received_data(
                    event.flow_controlled_length or 0, event.stream_id
                )
        return content
