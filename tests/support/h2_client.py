"""A client of HTTP/2 by hand, which also does what no well-behaved one would."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import hpack
import trio

from tests.support.http_stub import connect

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream_id: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big")
    return head + payload


def request_head(path: str = "/health", method: str = "GET", **more: str) -> bytes:
    headers = {
        ":method": method,
        ":scheme": "http",
        ":authority": "localhost",
        ":path": path,
        **more,
    }
    return bytes(hpack.Encoder().encode(list(headers.items())))


def get(stream_id: int, *, end: bool = True, path: str = "/health") -> bytes:
    flags = END_HEADERS | (END_STREAM if end else 0)
    return frame(HEADERS, request_head(path), flags=flags, stream_id=stream_id)


FLOODS = {
    "pings": frame(PING, bytes(8)),
    "settings": frame(SETTINGS),
    "priorities": frame(PRIORITY, bytes([0, 0, 0, 0, 1]), stream_id=3),
    "resets": frame(RST_STREAM, bytes(4), stream_id=1),
    "unknown frames": frame(99, b"?"),
    "empty pieces of a body": frame(DATA, stream_id=1),
    "window updates": frame(WINDOW_UPDATE, bytes([0, 0, 0, 1])),
}


class H2Client:
    """HTTP/2 by prior knowledge, by hand: what no well-behaved client would send."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._sending = trio.Lock()
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()

    def request(self, method: str, path: str | None, *, end: bool = True) -> int:
        stream_id = self.connection.get_next_available_stream_id()
        headers = [(":method", method), (":scheme", "http"), (":authority", "localhost")]
        if path is not None:
            headers.append((":path", path))
        self.connection.send_headers(stream_id, headers, end_stream=end)
        return stream_id

    def post(self, path: str, content: bytes) -> int:
        stream_id = self.request("POST", path, end=False)
        self.connection.send_data(stream_id, content, end_stream=True)
        return stream_id

    async def flush(self) -> None:
        async with self._sending:
            await self.stream.send_all(self.connection.data_to_send())

    async def events(self) -> AsyncIterator[Any]:
        """Events as they come, to the end of the connection."""
        while data := await self.stream.receive_some():
            for event in self.connection.receive_data(data):
                yield event
            await self.flush()

    async def response(self, stream_id: int, *, acknowledge: bool = True) -> tuple[str, bytes]:
        """Status and body of one stream."""
        status, content = "", b""
        async with contextlib.aclosing(self.events()) as events:
            async for event in events:
                if getattr(event, "stream_id", None) != stream_id:
                    continue
                if isinstance(event, h2.events.ResponseReceived):
                    status = dict(event.headers)[":status"]
                elif isinstance(event, h2.events.DataReceived):
                    content += event.data
                    if acknowledge:
                        self.connection.acknowledge_received_data(
                            event.flow_controlled_length, stream_id
                        )
                        await self.flush()
                elif isinstance(event, h2.events.StreamEnded):
                    return status, content
                elif isinstance(event, h2.events.StreamReset):
                    return "reset", content
        raise AssertionError("the connection ended")


@contextlib.asynccontextmanager
async def h2_client(url: str) -> AsyncIterator[H2Client]:
    async with await connect(url) as stream:
        client = H2Client(stream)
        await client.flush()
        yield client
