"""Reads many event streams as cheaply as it can, and the CPU time of the server that sends them.

It is a program of its own, which imports nothing of the project's: ``sse_client.py '{...}'``.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any

_CPUCLOCK_SCHED = 2
_BUFFER = 1 << 16
_PAUSE = 0.004
_IDLE_CPU, _IDLE_PAUSE = 0.01, 0.25
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW = (1 << 31) - 1
_SETTINGS, _HEADERS, _WINDOW_UPDATE, _DATA = 4, 1, 8, 0
_END_HEADERS, _END_STREAM = 4, 1


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads together."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def http1_request(path: str, body: bytes) -> bytes:
    """Return a POST of JSON."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def http2_opening() -> bytes:
    """Return the opening of a connection whose windows are never exhausted."""
    settings = b"\x00\x04" + _WINDOW.to_bytes(4, "big")  # SETTINGS_INITIAL_WINDOW_SIZE
    update = (_WINDOW - 65535).to_bytes(4, "big")
    return _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, update)


def http2_request(number: int, path: str, body: bytes) -> bytes:
    """Return the ``number``-th POST on its connection."""
    fields = {b":method": b"POST", b":scheme": b"http", b":authority": b"localhost"}
    fields |= {b":path": path.encode(), b"content-type": b"application/json"}
    headers = b"".join(_literal(name, value) for name, value in fields.items())
    stream = 2 * number + 1
    opening = _frame(_HEADERS, _END_HEADERS, stream, headers)
    return opening + _frame(_DATA, _END_STREAM, stream, body)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header that isn't indexed, its strings as they are."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def open_streams(job: dict[str, Any]) -> list[socket.socket]:
    """Return connections with all requests sent."""
    body = json.dumps(job["fields"]).encode()
    count, address = job["connections"] or job["streams"], ("127.0.0.1", job["port"])
    sockets = [socket.create_connection(address) for _ in range(count)]
    for each in sockets:
        each.sendall(http2_opening() if job["connections"] else http1_request(job["path"], body))
    for number in range(job["streams"] if job["connections"] else 0):
        request = http2_request(number // count, job["path"], body)
        sockets[number % count].sendall(request)
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

    def read_until(self, done: Any) -> None:
        """Read until ``done()`` says so, which is asked after each round.

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
    sockets = open_streams(job)
    reader = Reader(sockets, job["text"].encode())
    reader.read_until(lambda: reader.begun >= job["streams"])
    settled = time.monotonic() + job["settle"]
    reader.read_until(lambda: time.monotonic() >= settled)
    events, tokens = reader.events, reader.tokens
    started, cpu = time.monotonic(), cpu_seconds(job["pid"])
    reader.read_until(lambda: time.monotonic() >= started + job["seconds"])
    seconds, cpu = time.monotonic() - started, cpu_seconds(job["pid"]) - cpu
    found = {"events": reader.events - events, "tokens": reader.tokens - tokens}
    print(json.dumps({**found, "seconds": seconds, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main()
