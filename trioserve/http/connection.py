"""One client's connection: what goes wrong on it stays on it.

Hypercorn's own connection lets an exception end the whole server, waits for ever on a client that
doesn't read, and doesn't notice a client that leaves while its reader is parked (a pipelined
request, a full queue). Here every exception ends at the connection; a send that doesn't progress is
given up after ``send_timeout`` seconds, and :class:`Connections` tells a parked reader that its
client has gone.
"""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Awaitable, Callable

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    Scope,
)
from hypercorn.utils import parse_socket_addr

from trioserve.http.asgi import CONNECTION_STATE
from trioserve.http.protocol import Protocol, ServerSettings
from trioserve.logs import get_logger

__all__ = ["Connection", "Connections"]

LINGER = 2.0
"""Seconds for which a client that is still sending is listened to after our last word, so that its
own sending doesn't make its system throw our answer away."""
_SEND_SLICE = 1 << 16
"""Bytes that are to be taken within ``send_timeout``: a slow reader who does read isn't cut off."""

_log = get_logger("trioserve.http")


class _Tasks(TaskGroup):
    """The tasks of a connection. Nothing waits for an application that doesn't want to hear more.

    In hypercorn, an answer that comes before the whole body was read can leave the reader, or the
    application itself, waiting for ever at a queue that nobody empties.
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


class Connection(TCPServer):
    """Serves one accepted stream. ``stalled`` says that the client was cut off for not reading."""

    config: ServerSettings
    stream: trio.SocketStream  # type: ignore[assignment]

    def __init__(
        self,
        app: AppWrapper,
        config: ServerSettings,
        context: WorkerContext,
        stream: trio.SocketStream,
        connections: Connections,
    ) -> None:
        super().__init__(app, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        self.stalled = False
        self._connections = connections
        self._closing = False
        self._reading = trio.CancelScope()

    async def run(self) -> None:
        """Serve until either side closes. Raises nothing but cancellation."""
        descriptor = self.stream.socket.fileno()
        try:
            self._connections.add(descriptor, self)
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
            self.stream.socket.close()

    def abort(self) -> None:
        """End the connection at once: whatever reads, waits or sends on it stops."""
        self._reading.cancel()
        self.stream.socket.close()

    async def _serve(self) -> None:
        try:
            client = parse_socket_addr(self.stream.socket.family, self.stream.socket.getpeername())
            server = parse_socket_addr(self.stream.socket.family, self.stream.socket.getsockname())
        except OSError:
            return  # The client has left already.
        async with _Tasks() as task_group:
            self._task_group = task_group
            self.protocol = Protocol(
                self.app,
                self.config,
                self.context,
                task_group,
                ConnectionState({CONNECTION_STATE: self}),
                False,
                client,
                server,
                self.protocol_send,
                "http/1.1",
            )
            await self.protocol.initiate()
            await self.idle_task.restart(task_group, self._idle_timeout)
            await self._read_data()

    async def _read_data(self) -> None:
        with self._reading:
            while data := await self._receive():
                if not self._closing:
                    await self.protocol.handle(RawData(data))
        await self.idle_task.stop()
        # The client is gone, or half of it: there is nobody to send the rest to.
        self.stream.socket.close()
        await self.protocol.handle(Closed())

    async def _receive(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(MAX_RECV))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return b""

    async def protocol_send(self, event: Event) -> None:
        """Do what the protocol asks: send bytes, close, or note that nothing is being served."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed):
            self._finish()
            await self.protocol.handle(Closed())
        else:
            # Shielded: the end of a response cancels the task that sends it, and a connection whose
            # idle timeout wasn't started stays open for ever.
            with trio.CancelScope(shield=True):
                await super().protocol_send(event)

    async def _send(self, data: bytes) -> None:
        """Send all of ``data``, or give the connection up.

        Shielded, because half a frame would break what others send on the connection, and bounded,
        because a client that doesn't read must not hold anything up.
        """
        if not data:
            return
        async with self.send_lock:
            try:
                for start in range(0, len(data), _SEND_SLICE):
                    with trio.move_on_after(self.config.send_timeout, shield=True) as scope:
                        await self.stream.send_all(data[start : start + _SEND_SLICE])
                    if scope.cancelled_caught:
                        self.stalled = True
                        break
                else:
                    return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        self.abort()
        await self.protocol.handle(Closed())

    def _finish(self) -> None:
        """Say that nothing follows. A client that is still sending is listened to for a while.

        Doesn't wait: the application's task, which may be the caller, is being cancelled by now.
        """
        self._closing = True
        with contextlib.suppress(OSError):
            self.stream.socket.shutdown(trio.socket.SHUT_WR)
        if self._client_has_finished():
            self.abort()
        else:
            self._reading.deadline = trio.current_time() + LINGER

    def _client_has_finished(self) -> bool:
        connection = getattr(self.protocol.protocol, "connection", None)
        return isinstance(connection, h11.Connection) and connection.their_state in (
            *(h11.DONE, h11.MUST_CLOSE, h11.CLOSED),
        )

    async def _initiate_server_close(self) -> None:
        await self.protocol.handle(Closed())
        self.abort()


class Connections:
    """All connections of a server, and the task that notices when a client hangs up.

    A connection whose reader reads sees its client leave by itself. One whose reader is parked
    doesn't, so a second epoll, itself watched by trio, reports half-closed and broken sockets.
    Where there is no epoll, such a client is noticed when its reader reads again.
    """

    def __init__(self) -> None:
        self._open: dict[int, Connection] = {}
        """By file descriptor, which the system may give to the next as soon as one is closed."""
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._removed = trio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, descriptor: int, connection: Connection) -> None:
        """Watch a connection, by its socket's descriptor."""
        self._open[descriptor] = connection
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def remove(self, descriptor: int, connection: Connection) -> None:
        """Forget a connection. Its socket, closed or not, leaves the epoll when it is closed."""
        if self._open.get(descriptor) is connection:
            del self._open[descriptor]
        self._removed.set()

    def abort_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._open.values()):
            connection.abort()

    async def wait_none(self) -> None:
        """Wait until no connection is left."""
        while self._open:
            self._removed = trio.Event()
            await self._removed.wait()

    async def watch_hangups(self) -> None:
        """The task: end the connections whose clients have hung up. Runs until cancelled."""
        if self._epoll is None:
            await trio.sleep_forever()
            return
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for descriptor, _ in self._epoll.poll(0):
                connection = self._open.get(descriptor)
                if connection is not None:
                    connection.abort()

    def close(self) -> None:
        """Give the epoll back. The task has to have ended."""
        if self._epoll is not None:
            self._epoll.close()
