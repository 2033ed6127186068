"""One client's connection; every error on it ends only this connection.

In hypercorn's own connection, an exception ends the whole server. It also waits forever on a client
that doesn't read, and misses a client that leaves while its reader is parked (a pipelined request,
a full queue). Here an exception ends one connection. A send without progress is given up after
``send_timeout`` seconds. A client has ``request_timeout`` seconds for a handshake, and again for
the head of a request. :class:`~trioserve.http.server.connections.Connections` stops a parked reader
when its client has gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.trio.tcp_server import MAX_RECV
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    Scope,
)
from hypercorn.utils import parse_socket_addr

from trioserve.http.server.connections import Connections
from trioserve.http.server.handshakes import LINGER, HandshakeStream, refuse_without_tls
from trioserve.http.server.holdings import address_of
from trioserve.http.server.http1 import HeadBegun
from trioserve.http.server.protocol import Protocol
from trioserve.http.server.settings import ServerSettings
from trioserve.http.server.unsent import UnsentBudget
from trioserve.observability.logs import get_logger

_SEND_SLICE = 1 << 16
"""Bytes to be sent within ``send_timeout``; a slow client that still reads isn't cut off."""
_NO_LINGER = struct.pack("ii", 1, 0)
CONNECTION_STATE = "trioserve.connection"
"""Key of the connection in the ASGI state of a request."""

_log = get_logger("trioserve.http")


class _Tasks(TaskGroup):
    """The tasks of a connection. They drop messages for an application that has stopped receiving.

    In hypercorn, an answer sent before the whole body was read can block the reader, or the
    application itself, forever on a queue that is never emptied.
    """

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        to_app, from_client = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)

        async def run_app() -> None:
            with from_client:
                await _handle(
                    app,
                    config,
                    scope,
                    from_client.receive,
                    send,
                    trio.to_thread.run_sync,
                    trio.from_thread.run,
                )

        async def put(event: ASGIReceiveEvent) -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                if event["type"] == "http.disconnect":
                    # The application may be the caller; the rest of a body is worth nothing now.
                    with contextlib.suppress(trio.WouldBlock):
                        while True:
                            from_client.receive_nowait()
                    to_app.send_nowait(event)
                else:
                    await to_app.send(event)

        assert self._nursery is not None
        self._nursery.start_soon(run_app)
        return put


class Connection:
    """One accepted stream. ``stalled`` is true once its client was cut off for not reading."""

    def __init__(
        self,
        app: AppWrapper,
        settings: ServerSettings,
        context: WorkerContext,
        stream: trio.SocketStream,
        connections: Connections,
        budget: UnsentBudget,
    ) -> None:
        self.stalled = False
        self.address = ""
        """Address of the client, under which its holdings are counted."""
        with contextlib.suppress(OSError):  # The client may have left already.
            sock = stream.socket
            self.address = address_of(parse_socket_addr(sock.family, sock.getpeername()))
        self._app = app
        self._settings = settings
        self._context = context
        self._socket = stream.socket
        self._stream: trio.SocketStream | trio.SSLStream[HandshakeStream] = stream
        if settings.tls is not None:
            below = HandshakeStream(stream, connections.handshakes)
            self._stream = trio.SSLStream(below, settings.tls, server_side=True)
        self._connections = connections
        self._budget = budget
        self._servers_turn: set[int] = set()
        """Ids of the streams on which the server, not the client, has to act next."""
        self._num_unsent = 0
        """Number of sends still running because the client hasn't read them."""
        self._protocol: Protocol | None = None
        self._tasks: TaskGroup | None = None
        self._send_lock = trio.Lock()
        self._num_in_turn = 0 if settings.tls is None else 1
        """Number of sends that block, or may block, all other sends. With TLS, every send does."""
        self._unsent: bytes | memoryview = b""
        """Rest of a write that didn't wait; it is sent before anything else."""
        self._descriptor = self._socket.fileno()
        self._closing = False
        self._reading = trio.CancelScope(deadline=self._after(settings.request_timeout))

    async def run(self) -> None:
        """Serve until either side closes. Only cancellation is raised."""
        descriptor = self._descriptor
        try:
            self._connections.add(descriptor, self)
            if await self._set_up_tls():
                await self._serve()
        except BaseExceptionGroup as group:
            errors, others = group.split(Exception)
            if errors is not None:
                _log.warning("a connection was dropped", exc_info=errors)
            if others is not None:
                raise others from None
        except Exception as error:
            _log.warning("a connection was dropped", exc_info=error)
        finally:
            self._connections.remove(descriptor, self)
            self._budget.remove(self)
            if self._protocol is not None:
                self._protocol.drop_unsent()
            self._close_socket()

    @property
    def descriptor(self) -> int:
        """Return the socket's descriptor; it is negative once the socket is closed."""
        return self._descriptor

    def close(self) -> None:
        """Close an idle connection in an orderly way, as soon as its reader runs."""
        self._reading.cancel()

    def abort(self) -> None:
        """End the connection at once: every task that reads, waits or sends on it stops."""
        self._closing = True
        self._reading.cancel()
        self._close_socket()

    def reset(self) -> None:
        """End the connection at once, and drop what the system has still to send."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.abort()

    def cut_off(self) -> None:
        """End the connection because its client leaves too many bytes unread."""
        self.stalled = True
        self.reset()

    async def _set_up_tls(self) -> bool:
        """Run the TLS handshake, if there is TLS; return False if it failed."""
        if not isinstance(self._stream, trio.SSLStream):
            return True
        try:
            with self._reading:
                await self._stream.do_handshake()
                self._stream.transport_stream.note_done()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            await refuse_without_tls(self._socket, error.__cause__ or error)
            return False
        if self._reading.cancelled_caught:
            return False
        self._reading = trio.CancelScope(deadline=self._after(self._settings.request_timeout))
        return True

    async def _serve(self) -> None:
        try:
            client = parse_socket_addr(self._socket.family, self._socket.getpeername())
            server = parse_socket_addr(self._socket.family, self._socket.getsockname())
        except OSError:
            return  # The client has left already.
        tls = self._stream if isinstance(self._stream, trio.SSLStream) else None
        async with _Tasks() as tasks:
            self._tasks = tasks
            self._protocol = Protocol(
                *(self._app, self._settings, self._context, tasks),
                ConnectionState({CONNECTION_STATE: self}),
                client,
                server,
                self._do,
                self,
                self._budget,
                alpn=tls.selected_alpn_protocol() if tls is not None else None,
            )
            await self._protocol.initiate()
            await self._read(self._protocol)

    async def _read(self, protocol: Protocol) -> None:
        with self._reading:
            while data := await self._receive():
                if not self._closing:
                    await protocol.handle(RawData(data))
        if self._reading.cancelled_caught:
            if not self._closing:
                await protocol.end(timed_out=trio.current_time() >= self._reading.deadline)
            await self._close_tls()
        # The client has closed the connection, or half of it: the rest can't be delivered.
        self._close_socket()
        await protocol.handle(Closed())

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(MAX_RECV))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return b""

    async def _do(self, event: Event) -> None:
        """Handle a protocol event: send bytes, close, or note the state of a request."""
        if isinstance(event, RawData):
            await self.send(event.data)
        elif isinstance(event, Closed):
            await self._finish()
        elif isinstance(event, HeadBegun):
            self._read_until(self._after(self._settings.request_timeout))
        elif isinstance(event, Updated):
            self._note_idle(event.idle)

    def _note_idle(self, idle: bool) -> None:
        self._connections.note_idle(self, idle)
        if idle:
            self._servers_turn.clear()
            self._note_waiting()
        if not idle:
            self._read_until(math.inf)
        elif self._context.terminated.is_set():
            self.close()
        else:
            self._read_until(self._after(self._settings.keep_alive_timeout))

    def _read_until(self, deadline: float) -> None:
        if not self._closing:
            self._reading.deadline = deadline

    def _after(self, seconds: float) -> float:
        return trio.current_time() + seconds

    @property
    def ready(self) -> bool:
        """Return whether a send can start at once."""
        return not self._num_in_turn

    def send_now(self, data: bytes) -> bool:
        """Send ``data`` if the connection is :attr:`ready`, else do nothing and return False.

        A task sends what the system doesn't take at once.
        """
        if self._num_in_turn:
            return False
        if unsent := self._write(data):
            assert self._tasks is not None
            self._unsent = unsent
            self._begin_turn(len(unsent))
            self._tasks.spawn(self._send_in_turn, b"")
        return True

    def note_turn(self, stream_id: int, *, is_servers: bool) -> None:
        """Note whether the server or the client has to act next on a request."""
        if is_servers:
            self._servers_turn.add(stream_id)
        else:
            self._servers_turn.discard(stream_id)
        self._note_waiting()

    def _note_waiting(self) -> None:
        if self._descriptor >= 0:
            waits = not self._servers_turn or self._num_unsent > 0
            self._connections.note_waiting(self, waits)

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``, or give the connection up.

        A few hundred bytes nearly always fit into the system's buffer, so a write that doesn't wait
        is enough. A send that may wait needs a lock, a shield and a deadline, and costs several
        times as much.
        """
        if not self._num_in_turn:
            data = self._write(data)
        if data:
            self._begin_turn(len(data))
            await self._send_in_turn(data)

    def _begin_turn(self, size: int) -> None:
        """Count a send of ``size`` bytes that may wait."""
        self._num_in_turn += 1
        self._num_unsent += 1
        self._note_waiting()
        self._budget.add(self, size)

    def _write(self, data: bytes | memoryview) -> bytes | memoryview:
        """Send as much of ``data`` as the system takes, and return the rest."""
        try:
            sent = os.write(self._descriptor, data)
        except OSError:  # The buffer is full or the socket broken: the send that waits finds out.
            return data
        return b"" if sent == len(data) else memoryview(data)[sent:]

    async def _send_in_turn(self, data: bytes | memoryview) -> None:
        """Send all of ``data`` after the sends that are queued, or give the connection up.

        The send is shielded: part of it may have left already, and half a frame would break what
        others send on the connection. It has a deadline: a client that doesn't read must not block
        anything. The caller has begun the turn.
        """
        try:
            with trio.CancelScope(shield=True) as scope:
                # Each send ahead in the queue has a deadline of its own.
                async with self._send_lock:
                    parts, self._unsent = (memoryview(self._unsent), memoryview(data)), b""
                    for part in (
                        each[start : start + _SEND_SLICE]
                        for each in parts
                        for start in range(0, len(each), _SEND_SLICE)
                    ):
                        scope.deadline = self._after(self._settings.send_timeout)
                        await self._stream.send_all(part)
                        self._budget.remove(self, len(part))
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._num_in_turn -= 1
            self._num_unsent -= 1
            self._note_waiting()
        if scope.cancelled_caught:
            self.cut_off()
        else:
            self.abort()
        assert self._protocol is not None
        await self._protocol.handle(Closed())

    def _close_socket(self) -> None:
        # The system may give the same number to the next connection.
        self._descriptor = -1
        self._socket.close()

    async def _finish(self) -> None:
        """Send the end of the stream, then read for a while from a client that is still sending.

        This doesn't wait: the application's task may be the caller, and is already being cancelled.
        """
        assert self._protocol is not None
        self._closing = True
        if not isinstance(self._stream, trio.SSLStream):
            with contextlib.suppress(OSError):
                self._socket.shutdown(trio.socket.SHUT_WR)
        if self._protocol.client_has_finished:
            self._reading.cancel()
        else:
            self._reading.deadline = self._after(LINGER)
        await self._protocol.handle(Closed())

    async def _close_tls(self) -> None:
        """Send TLS's closing message, so the client can tell the end from a connection cut on the
        way.
        """
        if isinstance(self._stream, trio.SSLStream):
            with (
                contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
                trio.move_on_after(LINGER, shield=True),
            ):
                await self._stream.aclose()
