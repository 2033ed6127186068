"""One task that reads many sockets.

With a task per connection in ``receive_some``, each event would take two system calls to set up the
wait and two task switches, which cost more than reading it. Here one wait serves all sockets that
have become readable.
"""

from __future__ import annotations

import os
import select

import attrs
import trio

from trioserve.load.exchange import Exchange

READ_SIZE = 65536


@attrs.define(eq=False)
class _Reading:
    exchange: Exchange
    done: trio.Event = attrs.field(factory=trio.Event)
    error: OSError | None = None


class SocketReader:
    """Reader of the answers on any number of connections, while :meth:`run` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readings: dict[int, _Reading] = {}

    async def run(self) -> None:
        """Read until cancelled."""
        read, now = os.read, trio.current_time
        with self._epoll:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for fd, _ in self._epoll.poll(0):
                    reading = self._readings[fd]
                    try:
                        data = read(fd, READ_SIZE)
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        reading.error = error
                        self._end(fd, reading)
                        continue
                    if reading.exchange.receive(data, now()):
                        self._end(fd, reading)

    async def read(self, fd: int, exchange: Exchange) -> None:
        """Read the socket ``fd`` into ``exchange`` until the answer is complete.

        Raises:
            OSError: The connection broke.
        """
        reading = self._readings[fd] = _Reading(exchange)
        self._epoll.register(fd, select.EPOLLIN)
        try:
            await reading.done.wait()
        finally:
            if not reading.done.is_set():
                self._end(fd, reading)
        if reading.error is not None:
            raise reading.error

    def _end(self, fd: int, reading: _Reading) -> None:
        del self._readings[fd]
        if not self._epoll.closed:
            self._epoll.unregister(fd)
        reading.done.set()
