"""Reads many event streams as cheaply as it can, and the CPU time of the server that sends them.

It is a program of its own: ``python -m bench.front_end.sse_client '{...}'``.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from bench.front_end.client import http1_request

_CPUCLOCK_SCHED = 2
_BUFFER = 1 << 16
_PAUSE, _SETTLE = 0.004, 0.5
_IDLE_CPU, _IDLE_PAUSE = 0.01, 0.25
_WINDOW = (1 << 31) - 1


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads together."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def http2_requests(path: str, body: str, count: int) -> bytes:
    """Return the opening of a connection whose windows are never exhausted, and its POSTs."""
    connection = H2Connection(H2Configuration(client_side=True))
    connection.initiate_connection()
    connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW})
    connection.increment_flow_control_window(_WINDOW - 65535)
    headers = [(":method", "POST"), (":scheme", "http"), (":authority", "localhost")]
    headers += [(":path", path), ("content-type", "application/json")]
    for stream in range(1, 2 * count, 2):
        connection.send_headers(stream, headers)
        connection.send_data(stream, body.encode(), end_stream=True)
    return connection.data_to_send()


def open_streams(job: dict[str, Any]) -> list[socket.socket]:
    """Return connections with all requests sent."""
    body, streams = json.dumps(job["fields"]), job["streams"]
    count = job["connections"] or streams
    sockets = [socket.create_connection(("127.0.0.1", job["port"])) for _ in range(count)]
    for number, each in enumerate(sockets):
        if job["connections"]:
            share = len(range(number, streams, count))
            each.sendall(http2_requests(job["path"], body, share))
        else:
            each.sendall(http1_request(job["path"], body))
    return sockets


class Reader:
    """A counter of events, and of the token's text in them."""

    def __init__(self, sockets: list[socket.socket], text: bytes) -> None:
        self._sockets = {each.fileno(): each for each in sockets}
        self._epoll = select.epoll()
        for number, each in self._sockets.items():
            each.setblocking(False)
            self._epoll.register(number, select.EPOLLIN)
        self._buffer = bytearray(_BUFFER)
        self._text = text
        self._begun: set[int] = set()
        self._num_roles = 0
        self.events = 0
        self.tokens = 0

    @property
    def begun(self) -> int:
        """The number of streams that have given something: each has a socket, or else a first
        event that names a role."""
        return max(len(self._begun), self._num_roles)

    def read_until(self, done: Callable[[], bool]) -> None:
        """Read until ``done()``, which is asked after each round.

        What has come is looked for now and then and never waited for: a write that has to wake
        its reader costs the server as much as all else, in a measure that depends on how fast it
        writes, and clients on other machines cost it none of that.
        """
        while not done():
            time.sleep(_PAUSE)
            for number, _ in self._epoll.poll(0, maxevents=len(self._sockets)):
                size = self._sockets[number].recv_into(self._buffer)
                if not size:
                    raise SystemExit("the server closed a stream")
                self._begun.add(number)
                self._num_roles += self._buffer.count(b'"role"', 0, size)
                self.events += self._buffer.count(b"data: ", 0, size)
                self.tokens += self._buffer.count(self._text, 0, size)

    def read_for(self, seconds: float) -> float:
        """Read for so many seconds; return how many it were."""
        began = time.monotonic()
        self.read_until(lambda: time.monotonic() >= began + seconds)
        return time.monotonic() - began


def wait_until_idle(pid: int) -> None:
    """Wait until a process has nothing left to do of what came before."""
    before = -1.0
    while (now := cpu_seconds(pid)) - before > _IDLE_CPU:
        before = now
        time.sleep(_IDLE_PAUSE)


def main() -> None:
    """Measure one window and print the figures as JSON."""
    job = json.loads(sys.argv[1])
    wait_until_idle(job["pid"])
    reader = Reader(open_streams(job), job["text"].encode())
    reader.read_until(lambda: reader.begun >= job["streams"])
    reader.read_for(_SETTLE)
    events, tokens, cpu = reader.events, reader.tokens, cpu_seconds(job["pid"])
    seconds = reader.read_for(job["seconds"])
    cpu = cpu_seconds(job["pid"]) - cpu
    found = {"events": reader.events - events, "tokens": reader.tokens - tokens}
    print(json.dumps({**found, "seconds": seconds, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main()
