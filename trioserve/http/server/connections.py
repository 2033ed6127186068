"""All connections of a server: their limit, their eviction, and the detection of hang-ups."""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
from collections import deque
from typing import Protocol

import trio

from trioserve.http.server.handshakes import HANDSHAKES_TOGETHER
from trioserve.http.server.holdings import Holdings

MAX_CONNECTIONS = 4096
MOST_TOGETHER = 64
"""Connections accepted in one turn of the event loop, after the first."""
PATIENCE = 0.1
"""Seconds that a client may wait for its own process before another process accepts it."""
_RESERVED_DESCRIPTORS = 128
"""Descriptors reserved for listeners, workers' sockets, model files and other open files."""


def connection_limit() -> int:
    """Return how many connections to hold at a time: the process's limit less the reserved
    descriptors.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(most - _RESERVED_DESCRIPTORS, most // 2))


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to what that many connections need, if the system allows it.

    Only for a process of our own: programs that use ``select`` can't handle more than 1024.
    """
    current, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _RESERVED_DESCRIPTORS
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if current != resource.RLIM_INFINITY and current < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class HeldConnection(Protocol):
    """A connection, as far as its accounting uses it."""

    address: str

    @property
    def descriptor(self) -> int: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def reset(self) -> None: ...


class Connections:
    """The open connections, and the task that detects hang-ups.

    A reader that reads notices by itself that its client has left. A parked reader doesn't, so a
    second epoll, itself watched by trio, reports half-closed and broken sockets. Without epoll, the
    hang-up is noticed at the reader's next read.
    """

    def __init__(self, limit: int = MAX_CONNECTIONS) -> None:
        self._limit = limit
        self._open: dict[int, HeldConnection] = {}
        """Connections by file descriptor; the system may reuse the number as soon as one is closed.
        """
        self._idle: dict[HeldConnection, None] = {}
        """Connections that serve no request."""
        self._waiting: Holdings[HeldConnection] = Holdings()
        """Connections that wait for their clients, and may be evicted to make room."""
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._removed = trio.Event()
        self.handshakes = trio.Semaphore(HANDSHAKES_TOGETHER)
        """Permits of TLS handshakes; each handshake holds one for its turn."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, descriptor: int, connection: HeldConnection) -> None:
        """Watch a connection under its socket's descriptor. It starts idle."""
        self._open[descriptor] = connection
        self._idle[connection] = None
        self._waiting.add(connection.address, connection, 1)
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def note_idle(self, connection: HeldConnection, idle: bool) -> None:
        """Note that a connection has begun to serve a request, or has answered its last one."""
        self._idle.pop(connection, None)
        if idle:
            self._idle[connection] = None

    def note_waiting(self, connection: HeldConnection, waiting: bool) -> None:
        """Note whether a connection waits for nothing but its client.

        That is so while the client has sent no request or only a part of one, and while it leaves
        an answer unread.
        """
        self._waiting.remove(connection)
        if waiting:
            self._waiting.add(connection.address, connection, 1)

    def remove(self, descriptor: int, connection: HeldConnection) -> None:
        """Forget a connection. Its socket leaves the epoll when it is closed, now or later."""
        if self._open.get(descriptor) is connection:
            del self._open[descriptor]
        self._idle.pop(connection, None)
        self._waiting.remove(connection)
        self._removed.set()
        self._removed = trio.Event()

    @property
    def num_free(self) -> int:
        """Return how many more connections there may be."""
        return self._limit - len(self._open)

    async def make_room(self) -> None:
        """Block until there is room for one more connection.

        The address with the most connections that wait for their clients loses its oldest one.
        """
        while len(self._open) >= self._limit and not self.evict():
            await self._removed.wait()

    def evict(self) -> bool:
        """End a connection that waits for its client; return False if there is none."""
        connection = self._waiting.first_to_go()
        if connection is None:
            return False
        descriptor = connection.descriptor
        connection.reset()
        self.remove(descriptor, connection)
        return True

    def close_idle(self) -> None:
        """Close the connections that serve no request."""
        for connection in self._idle:
            connection.close()

    def abort_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._open.values()):
            connection.abort()

    async def wait_none(self) -> None:
        """Block until no connection is left."""
        while self._open:
            await self._removed.wait()

    async def watch_hangups(self) -> None:
        """End connections that their clients have hung up. The task runs until cancelled."""
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
        """Close the epoll. The task has to have ended."""
        if self._epoll is not None:
            self._epoll.close()


class BoundedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that leaves clients in the system's queue while the connections are at their
    limit.

    Clients that arrive together are accepted together. Accepted one by one, the last of a thousand
    would wait for a thousand turns of the event loop, each of which advances every request.
    """

    def __init__(self, listener: trio.SocketListener, connections: Connections) -> None:
        self._listener = listener
        self._connections = connections
        self._taken: deque[socket.socket] = deque()
        """Sockets accepted and not yet returned."""

    async def accept(self) -> trio.SocketStream:
        """Return the next connection, once there is room for it.

        It is not always a checkpoint: up to ``MOST_TOGETHER`` waiting clients follow one
        checkpoint.
        """
        if self._taken:
            return self._first_taken()
        stream = await self._next()
        try:
            await self._connections.make_room()
        except BaseException:
            stream.socket.close()
            raise
        self._take_more()
        return stream

    async def _next(self) -> trio.SocketStream:
        return await self._listener.accept()

    def _first_taken(self) -> trio.SocketStream:
        return trio.SocketStream(trio.socket.from_stdlib_socket(self._taken.popleft()))

    def _take_more(self) -> None:
        """Accept the clients that wait, as far as there is room or can be made."""
        with socket.socket(fileno=os.dup(self._listener.socket.fileno())) as listener:
            waiting = select.poll()
            waiting.register(listener, select.POLLIN)
            while len(self._taken) < MOST_TOGETHER and waiting.poll(0):
                has_room = self._connections.num_free - 1 > len(self._taken)
                if not has_room and not self._connections.evict():
                    return
                try:
                    accepted, _ = listener.accept()
                except OSError:  # The queue is empty, or the error comes again where it is handled.
                    return
                accepted.setblocking(False)
                self._taken.append(accepted)

    async def aclose(self) -> None:
        """Close the listener below, and the accepted sockets that weren't returned."""
        while self._taken:
            self._taken.popleft().close()
        await self._listener.aclose()


class FallbackListener(BoundedListener):
    """Another process's listener, used only for clients which that process leaves waiting.

    That process may be dead, busy, or at its limit of connections. While it accepts its clients
    soon, each of them costs this process two turns of the event loop.
    """

    async def _next(self) -> trio.SocketStream:
        while True:
            await trio.lowlevel.wait_readable(self._listener.socket)
            await trio.sleep(PATIENCE)
            self._take_more()
            if self._taken:
                return self._first_taken()
