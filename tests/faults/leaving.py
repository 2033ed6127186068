"""Clients that leave: at every stage of a request, in every manner that HTTP and TCP know."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import h2.config
import h2.connection
import h2.events
import msgspec
import trio

STAGES = ("connected", "head", "body", "asked", "first event", "some events", "stalled")
"""Stages of a client: half of the head sent, the head, half of the body, all of the request; the
first event read, a few of them; or nothing read for a while."""
MANNERS = ("fin", "rst", "half-close", "h2 rst_stream", "h2 goaway", "h2 close")
"""Manners of leaving: it closes, resets the connection, or closes its own half only; with HTTP/2
it resets its stream, says that it goes, or just closes."""
_PATH = "/v1/completions"
_TYPE = "application/json"


@attrs.define(eq=False, kw_only=True)
class Visit:
    """One client: its request, and when and how it leaves.

    In the stage ``stalled`` it reads nothing for ``patience`` seconds. ``status`` is the one that
    it was answered before it left, 0 for none.
    """

    port: int
    fields: Mapping[str, Any]
    stage: str
    manner: str
    events: int = 5
    patience: float = 0.5
    status: int = 0

    async def run(self) -> None:
        """Come, ask, and leave."""
        body = msgspec.json.encode({**self.fields, "stream": True})
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        visit = self._visit_h2 if self.manner.startswith("h2") else self._visit_h1
        try:
            await visit(stream, body)
        except (trio.BrokenResourceError, OSError):
            pass  # The server may close first: it refuses what it can't read.
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _visit_h1(self, stream: trio.SocketStream, body: bytes) -> None:
        head = (
            f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        parts = {"connected": head[: len(head) // 2], "head": head}
        parts["body"] = head + body[: len(body) // 2]
        await stream.send_all(parts.get(self.stage, head + body))
        await self._wait(stream, lambda data: data)
        if self.manner == "half-close":
            stream.socket.shutdown(socket.SHUT_WR)
            # Such a client may well read on; this one doesn't wait for the end.
            with trio.move_on_after(self.patience):
                while await stream.receive_some():
                    pass
            return
        if self.manner == "rst":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()

    async def _wait(self, stream: trio.SocketStream, content: Callable[[bytes], bytes]) -> None:
        """Read, or don't, until it is time to leave; ``content`` unpacks what is read."""
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
            seen += text.count(b"data: ")

    async def _visit_h2(self, stream: trio.SocketStream, body: bytes) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration())
        connection.initiate_connection()
        number = connection.get_next_available_stream_id()
        if self.stage != "connected":
            headers = {":method": "POST", ":scheme": "http", ":authority": "localhost"}
            headers |= {":path": _PATH, "content-type": _TYPE, "content-length": str(len(body))}
            connection.send_headers(number, list(headers.items()))
        if self.stage == "body":
            connection.send_data(number, body[: len(body) // 2])
        elif self.stage not in ("connected", "head"):
            for start in range(0, len(body), 16384):
                connection.send_data(number, body[start : start + 16384])
            connection.end_stream(number)
        await stream.send_all(connection.data_to_send())
        await self._wait(stream, lambda data: self._content_of(connection, data))
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
                length = event.flow_controlled_length or 0
                connection.acknowledge_received_data(length, event.stream_id)
        return content
