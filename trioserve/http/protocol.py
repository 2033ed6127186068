"""Hypercorn's HTTP/1.1 and HTTP/2, extended where they are not enough for us.

Hypercorn is pinned exactly, because these classes stand on its inner ones. HTTP/2 there has no
backpressure: what a client's window doesn't let out piles up without bound. Here a writer waits
while more than ``BUFFER_HIGH_WATER`` bytes are queued on its stream, and a stream that makes no
progress for ``send_timeout`` seconds is reset.
"""

from __future__ import annotations

from typing import Any

import h2.events
import trio
from hypercorn.config import Config
from hypercorn.events import Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError
from hypercorn.trio.worker_context import EventWrapper

__all__ = ["Protocol", "ServerSettings"]


class ServerSettings(Config):
    """Hypercorn's configuration with what it doesn't know."""

    send_timeout: float = 30.0
    """Seconds a client may leave our bytes unread."""


class _StalledStreamError(Exception):
    """A client let nothing of a stream through for too long."""


class _BoundedBuffer(StreamBuffer):
    """What waits on one HTTP/2 stream. Both waits end with an error when nothing moves."""

    def __init__(self, stall_timeout: float) -> None:
        super().__init__(EventWrapper)
        self._stall_timeout = stall_timeout
        self._moved = trio.Event()

    async def push(self, data: bytes) -> None:
        while len(self.buffer) >= BUFFER_HIGH_WATER and not self._complete:
            await self._wait_for_movement()
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()

    async def drain(self) -> None:
        while self.buffer:
            await self._wait_for_movement()

    async def pop(self, max_length: int) -> bytes:
        data = await super().pop(max_length)
        if data:
            self._signal()
        return data

    async def close(self) -> None:
        await super().close()
        self._signal()

    def _signal(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _wait_for_movement(self) -> None:
        with trio.move_on_after(self._stall_timeout) as scope:
            await self._moved.wait()
        if scope.cancelled_caught:
            raise _StalledStreamError


class _H2(H2Protocol):
    """HTTP/2 with bounded buffers."""

    config: ServerSettings

    async def _create_stream(self, request: Any) -> None:
        await super()._create_stream(request)
        # The application's task has been spawned and not run: nothing is in the buffer yet.
        if request.stream_id in self.stream_buffers:
            self.stream_buffers[request.stream_id] = _BoundedBuffer(self.config.send_timeout)

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                # Answered, refused or reset already; the connection's window is not to close.
                self.connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            else:
                await super()._handle_events([event])
        await self._flush()

    async def stream_send(self, event: StreamEvent) -> None:
        try:
            await super().stream_send(event)
        except _StalledStreamError:
            await self._reset(event.stream_id)

    async def _reset(self, stream_id: int) -> None:
        """Give one stream up: the application sees its client leave, the others go on."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None:
            await buffer.close()
        self.connection.reset_stream(stream_id)
        await self._flush()
        await super().stream_send(StreamClosed(stream_id=stream_id))


class Protocol(ProtocolWrapper):
    """Chooses between the two, by what the client says."""

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            await self._switch()
            await self._first_data(error.data)
        except H2CProtocolRequiredError as error:
            await self._switch(error.headers, error.settings)
            await self._first_data(error.data)

    async def _switch(
        self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None
    ) -> None:
        self.protocol = _H2(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.state,
            self.ssl,
            self.client,
            self.server,
            self.send,
        )
        await self.protocol.initiate(headers, settings)

    async def _first_data(self, data: bytes) -> None:
        if data:
            await self.protocol.handle(RawData(data=data))
