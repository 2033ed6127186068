"""All connections of a server: how many there may be, which make room, and which have hung up."""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING

import trio

from trioserve.http.server.handshakes import HANDSHAKES_TOGETHER
from trioserve.http.server.holdings import Holdings

if TYPE_CHECKING:
    from trioserve.http.server.connection import Connection

MAX_CONNECTIONS = 4096
MOST_TOGETHER = 64
"""Connections that are accepted in one turn of the event loop, after the first."""
PATIENCE = 0.1
"""Seconds that a client may wait for the process that it is for, before another takes it."""
_RESERVED_DESCRIPTORS = 128
"""For listeners, the worker's sockets, model files and whatever else the process has open."""


def connection_limit() -> int:
    """How many connections to hold at a time: what the process may open leaves room for them."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(most - _RESERVED_DESCRIPTORS, most // 2))


def raise_descriptor_limit() -> None:
    """Let the process open as many files as that many connections take, where it may.

    For a process that is all ours: where programs use ``select``, more than 1024 are trouble.
    """
    current, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _RESERVED_DESCRIPTORS
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if current != resource.RLIM_INFINITY and current < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Connections:
    """The open connections, and the task that notices when a client hangs up.

    A connection whose reader reads sees its client leave by itself. One whose reader is parked
    doesn't, so a second epoll, itself watched by trio, reports half-closed and broken sockets.
    Where there is no epoll, such a client is noticed when its reader reads again.
    """

    def __init__(self, limit: int = MAX_CONNECTIONS) -> None:
        self._limit = limit
        self._open: dict[int, Connection] = {}
        """By file descriptor, which the system may give to the next as soon as one is closed."""
        self._idle: dict[Connection, None] = {}
        """The connections that serve nothing."""
        self._waiting: Holdings[Connection] = Holdings()
        """The connections that wait for their clients, which may be ended to make room."""
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._removed = trio.Event()
        self.handshakes = trio.Semaphore(HANDSHAKES_TOGETHER)
        """Held by a TLS handshake while it waits for its turn."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, descriptor: int, connection: Connection) -> None:
        """Watch a connection, by its socket's descriptor. It serves nothing yet."""
        self._open[descriptor] = connection
        self._idle[connection] = None
        self._waiting.add(connection.address, connection, 1)
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def note_idle(self, connection: Connection, idle: bool) -> None:
        """A connection has begun to serve a request, or has answered its last one."""
        self._idle.pop(connection, None)
        if idle:
            self._idle[connection] = None

    def note_waiting(self, connection: Connection, waiting: bool) -> None:
        """Note whether a connection waits for its client alone.

        The client has nothing to ask, hasn't sent all of a request, or leaves an answer unread.
        """
        self._waiting.remove(connection)
        if waiting:
            self._waiting.add(connection.address, connection, 1)

    def remove(self, descriptor: int, connection: Connection) -> None:
        """Forget a connection. Its socket, closed or not, leaves the epoll when it is closed."""
        if self._open.get(descriptor) is connection:
            del self._open[descriptor]
        self._idle.pop(connection, None)
        self._waiting.remove(connection)
        self._removed.set()
        self._removed = trio.Event()

    @property
    def num_free(self) -> int:
        """How many more connections there may be."""
        return self._limit - len(self._open)

    async def make_room(self) -> None:
        """Block until there is room for one more connection.

        The address with the most connections that wait for their clients loses the oldest of them.
        """
        while len(self._open) >= self._limit and not self.evict():
            await self._removed.wait()

    def evict(self) -> bool:
        """End a connection that waits for its client, and so make room; False if there is none."""
        connection = self._waiting.first_to_go()
        if connection is None:
            return False
        descriptor = connection.descriptor
        connection.reset()
        self.remove(descriptor, connection)
        return True

    def close_idle(self) -> None:
        """Close the connections that serve nothing."""
        for connection in self._idle:
            connection.close()

    def abort_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._open.values()):
            connection.abort()

    async def wait_none(self) -> None:
        """Wait until no connection is left."""
        while self._open:
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


class BoundedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that leaves clients in the system's queue while there are enough connections.

    Clients who come together are taken together: by one in each turn of the event loop, the last
    of a thousand would wait for a thousand turns, each of which is a step of all who are served.
    """

    def __init__(self, listener: trio.SocketListener, connections: Connections) -> None:
        self._listener = listener
        self._connections = connections
        self._taken: deque[socket.socket] = deque()
        """Accepted, and not yet returned."""

    async def accept(self) -> trio.SocketStream:
        """The next connection, once it has its place among the others.

        Not always a checkpoint: one is followed by at most ``MOST_TOGETHER`` that were there.
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
                except OSError:  # None is left, or it goes wrong again where it is seen to.
                    return
                accepted.setblocking(False)
                self._taken.append(accepted)

    async def aclose(self) -> None:
        """Close the listener beneath, and whoever hasn't been returned."""
        while self._taken:
            self._taken.popleft().close()
        await self._listener.aclose()


class FallbackListener(BoundedListener):
    """Another process's listener, whose clients are taken only where that process leaves them.

    It may have died, or be busy, or have as many connections as it may. While it takes them soon,
    each of its clients costs this process two turns of the event loop.
    """

    async def _next(self) -> trio.SocketStream:
        while True:
            await trio.lowlevel.wait_readable(self._listener.socket)
            await trio.sleep(PATIENCE)
            self._take_more()
            if self._taken:
                return self._first_taken()
