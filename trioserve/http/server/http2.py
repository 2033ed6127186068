"""HTTP/2 on one connection: hypercorn's protocol with backpressure and limits.

Hypercorn's protocol queues without bound what a client's window doesn't let out. Here a writer
blocks while more than ``BUFFER_HIGH_WATER`` bytes are queued on its stream, and a stream without
progress for ``send_timeout`` seconds is reset. An error on one stream resets that stream. The
others go on; behind a proxy they may belong to other clients. A client that sends many useless
frames is cut off (:mod:`trioserve.http.server.http2_rate`).
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import h2.events
import h2.exceptions
import h2.settings
import trio
from h2.errors import ErrorCodes
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request, StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.trio.worker_context import EventWrapper
from hypercorn.utils import filter_pseudo_headers

from trioserve.http.server.client_settings import ClientSettings
from trioserve.http.server.fast_path import ByteOutput, FastPathStream
from trioserve.http.server.holdings import address_of
from trioserve.http.server.http1 import path_of
from trioserve.http.server.http2_rate import FrameRefused, Http2RateLimiter
from trioserve.http.server.settings import ServerSettings
from trioserve.http.server.unsent import UnsentBudget
from trioserve.observability.logs import get_logger

_READ_SLICE = 1 << 13
"""Bytes parsed at once: as many small frames take 20 ms."""
_SEND_SLICE = 1 << 16
"""Bytes to be sent within ``send_timeout``, as over HTTP/1.1."""
_USEFUL_SIZE = 64
"""Bytes of a piece of an answer that is large enough to justify window updates."""
_METHOD_CHARACTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_")

_log = get_logger("trioserve.http")


class _StalledStreamError(Exception):
    """Error: a client let no byte of a stream through for too long."""


class _BoundedBuffer(StreamBuffer):
    """The bytes queued on one HTTP/2 stream, by reference.

    Both waits end with an error when too little moves, or when the answer is cut off for others.
    """

    def __init__(
        self,
        stall_timeout: float,
        budget: UnsentBudget,
        address: str,
        *,
        on_sent: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(EventWrapper)
        self.address = address
        self._stall_timeout = stall_timeout
        self._budget = budget
        self._on_sent = on_sent
        self._on_change = on_change
        self._parts: deque[memoryview] = deque()
        self._size = 0
        self._is_cut_off = False
        self._moved = trio.Event()

    @property
    def ended(self) -> bool:
        """Return whether the queue is closed to more bytes."""
        return self._complete

    @property
    def complete(self) -> bool:
        """Return whether all has been sent."""
        return self._complete and not self._size

    @property
    def is_empty(self) -> bool:
        """Return whether the queue is empty and still open."""
        return not self._size and not self._is_cut_off

    def cut_off(self) -> None:
        """Drop what is queued; the task that writes the answer gets an error."""
        self._is_cut_off = True
        self.drop()

    async def push(self, data: bytes) -> None:
        await self._wait_below(BUFFER_HIGH_WATER)
        if self._complete:
            raise BufferCompleteError
        self._parts.append(memoryview(data))
        self._size += len(data)
        self._on_change()
        self._budget.add(self, len(data))
        self._check()

    async def drain(self) -> None:
        await self._wait_below(1)

    async def pop(self, max_length: int) -> bytes:
        pieces = []
        left = max_length
        while left and self._parts:
            part = self._parts.popleft()
            pieces.append(part[:left])
            if len(part) > left:
                self._parts.appendleft(part[left:])
            left -= len(pieces[-1])
        if pieces:
            self._size -= max_length - left
            self._budget.remove(self, max_length - left)
            if max_length - left >= _USEFUL_SIZE or not self._parts:
                self._on_sent()
            self._signal()
        return b"".join(pieces)

    async def close(self) -> None:
        self._complete = True
        self.drop()

    def drop(self) -> None:
        """Drop what is queued."""
        self._parts.clear()
        self._size = 0
        self._budget.remove(self)
        self._signal()

    def _signal(self) -> None:
        if not self._size:
            self._on_change()
        self._moved.set()
        self._moved = trio.Event()

    def _check(self) -> None:
        if self._is_cut_off:
            raise _StalledStreamError

    async def _wait_below(self, size: int) -> None:
        """Block until fewer than ``size`` bytes are queued; closing the buffer empties it."""
        self._check()
        while self._size >= size:
            target = max(size, self._size - _SEND_SLICE)
            with trio.move_on_after(self._stall_timeout) as scope:
                while self._size >= target:
                    await self._moved.wait()
            self._check()
            if scope.cancelled_caught:
                raise _StalledStreamError


class _LocalSettings(h2.settings.Settings):
    """Our settings. For one stream too many, h2 would end the connection; we refuse the stream."""

    def get(self, key: int, default: Any = None) -> Any:
        """Return the value that h2 enforces; the client is told another one."""
        is_limit = key == h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS
        return 1 << 31 if is_limit else super().get(key, default)


class HTTP2(H2Protocol):
    """HTTP/2 protocol of one client, which serves many requests at a time."""

    config: ServerSettings

    def __init__(self, *arguments: Any, output: ByteOutput, budget: UnsentBudget) -> None:
        super().__init__(*arguments)
        self._output = output
        self._budget = budget
        self._meter = Http2RateLimiter()
        self._still_sending: dict[int, None] = {}
        """Streams that their clients haven't ended, answered or not."""
        self.connection.remote_settings = ClientSettings(client=True)
        codes = h2.settings.SettingCodes
        self.connection.local_settings = _LocalSettings(
            client=False,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
                codes.MAX_HEADER_LIST_SIZE: self.config.h2_max_header_list_size,
                codes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )

    async def handle(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        try:
            for start in range(0, len(event.data), _READ_SLICE):
                part = event.data[start : start + _READ_SLICE]
                self._meter.read(part, trio.current_time())
                await super().handle(RawData(part))
                if self.closed:
                    return
                await trio.lowlevel.checkpoint()
        except FrameRefused as error:
            await self._cut_off(error)

    async def end(self, *, timed_out: bool) -> None:
        """Stop reading; no request is being served."""
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.connection.close_connection()
            await self._flush()

    def drop_unsent(self) -> None:
        """Drop the bytes queued on streams."""
        for buffer in self.stream_buffers.values():
            if isinstance(buffer, _BoundedBuffer):
                buffer.drop()

    async def _cut_off(self, error: FrameRefused) -> None:
        client = self.client[0] if self.client else None
        _log.warning("an HTTP/2 client was cut off", reason=str(error), client=client)
        self.connection.close_connection(error.code)
        await self._flush()
        await self.send(Closed())

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if self.closed:
                return
            if isinstance(event, h2.events.RequestReceived):
                await self._take_request(event)
            elif isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                # The stream was answered, refused or reset already; the connection's window has to
                # stay open.
                self.connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            else:
                if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    self._still_sending.pop(event.stream_id, None)
                    self._note_turn(event.stream_id)
                if isinstance(event, h2.events.StreamReset) and not event.remote_reset:
                    self._meter.charge(
                        trio.current_time()
                    )  # The stream was reset for an error on it.
                await super()._handle_events([event])
        await self._flush()

    async def _take_request(self, request: h2.events.RequestReceived) -> None:
        stream_id = request.stream_id
        num_open = len(self.streams.keys() | self._still_sending.keys())
        if self.context.terminated.is_set() or num_open >= self.config.h2_max_concurrent_streams:
            self._refuse(stream_id, ErrorCodes.REFUSED_STREAM)
        elif not _is_well_formed(dict(request.headers)):
            self._refuse(stream_id, ErrorCodes.PROTOCOL_ERROR)
        else:
            self._still_sending[stream_id] = None
            await super()._handle_events([request])

    def _refuse(self, stream_id: int, code: ErrorCodes) -> None:
        self._meter.charge(trio.current_time())
        self._reset_stream(stream_id, code)

    def _reset_stream(self, stream_id: int, code: ErrorCodes) -> None:
        self._still_sending.pop(stream_id, None)
        # The client may have reset the stream in the same read that opened it.
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.connection.reset_stream(stream_id, code)

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        stream_id, headers = request.stream_id, dict(request.headers)
        self.streams[stream_id] = FastPathStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
            write_piece=self._write_piece,
        )
        self.stream_buffers[stream_id] = _BoundedBuffer(
            self.config.send_timeout,
            self._budget,
            address_of(self.client),
            on_sent=self._meter.note_data_sent,
            on_change=functools.partial(self._note_turn, stream_id),
        )
        self.priority.insert_stream(stream_id)
        self.priority.block(stream_id)
        await self.streams[stream_id].handle(
            Request(
                stream_id=stream_id,
                headers=filter_pseudo_headers(request.headers),
                http_version="2",
                method=headers[b":method"].decode("ascii").upper(),
                raw_path=headers[b":path"],
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    def _write_piece(self, stream_id: int, data: bytes) -> bool:
        """Send a piece of a body as one frame, if the stream's queue is empty and the windows allow
        it.

        A larger piece, or one that has to wait, goes through the stream's buffer.
        """
        buffer = self.stream_buffers.get(stream_id)
        if not isinstance(buffer, _BoundedBuffer) or not buffer.is_empty:
            return False
        if self.closed or not self._output.ready:
            return False
        try:
            self.connection.send_data(stream_id, data)
        except h2.exceptions.ProtocolError:
            return False
        self._meter.note_data_sent()
        self._output.send_now(self.connection.data_to_send())
        return True

    def _note_turn(self, stream_id: int) -> None:
        """Tell the connection whether the server or the client has to act next on a stream."""
        buffer = self.stream_buffers.get(stream_id)
        unread = isinstance(buffer, _BoundedBuffer) and not buffer.is_empty
        is_open = stream_id in self.streams and stream_id not in self._still_sending
        self._output.note_turn(stream_id, is_servers=is_open and not unread)

    async def _close_stream(self, stream_id: int) -> None:
        await super()._close_stream(stream_id)
        self._note_turn(stream_id)

    async def _flush(self) -> None:
        if data := self.connection.data_to_send():
            await self._output.send(data)

    async def _priority_updated(self, event: h2.events.PriorityUpdated) -> None:
        """Do nothing: all streams are equal, because HTTP/2's priorities are deprecated."""

    async def stream_send(self, event: StreamEvent) -> None:
        buffer = self.stream_buffers.get(event.stream_id)
        unfinished = isinstance(buffer, _BoundedBuffer) and not buffer.ended
        if isinstance(event, StreamClosed) and unfinished and not self.closed:
            # The application has left before its response was complete.
            await self._abandon(event.stream_id, ErrorCodes.INTERNAL_ERROR)
            return
        try:
            await super().stream_send(event)
        except _StalledStreamError:
            await self._abandon(event.stream_id, ErrorCodes.CANCEL)

    async def _abandon(self, stream_id: int, code: ErrorCodes) -> None:
        """Give one stream up: the application sees its client leave, the others go on."""
        if buffer := self.stream_buffers.get(stream_id):
            await buffer.close()
        self._reset_stream(stream_id, code)
        await self._flush()
        # For the sending task, which forgets a stream when it finds it closed.
        with contextlib.suppress(KeyError):
            self.priority.unblock(stream_id)
        await super().stream_send(StreamClosed(stream_id=stream_id))


def _is_well_formed(headers: dict[bytes, bytes]) -> bool:
    method = headers.get(b":method", b"")
    path = headers.get(b":path", b"")
    return (
        _METHOD_CHARACTERS.issuperset(method)
        and method not in (b"", b"CONNECT")
        and path_of(path) == path
    )
