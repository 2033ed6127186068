"""A client that costs almost nothing: one thread, one epoll, requests of one shape, counted events.

``python -m bench.front_end.client`` reads a :class:`Load` as JSON from its standard input and
prints a :class:`Seen`. It is a process of its own, so that it can have a core of its own, and it
parses nothing: an event is where ``data: {`` begins, an answer ends with the last chunk of HTTP.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import attrs
import msgspec

__all__ = ["Load", "Seen", "run"]

_GOOD = b"HTTP/1.1 200"
_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"
_READ = 1 << 16
_USAGE = b'"completion_tokens":'


@attrs.frozen(kw_only=True)
class Load:
    """``bodies`` are JSON texts of requests, each sent once, over ``streams`` connections."""

    host: str
    port: int
    path: str
    streams: int
    bodies: list[str]
    cores: list[int]
    """Where the client runs; nowhere in particular if empty."""


@attrs.frozen(kw_only=True)
class Seen:
    """What came back. Times are seconds, of the client's processor time too."""

    duration: float
    requests: int
    tokens: int
    """As the server counts them."""
    events: int
    """Events with JSON in them, less each answer's last, which only has the usage."""
    ttft: list[float]
    gaps: list[float]
    """Between reads of one answer: a sample of at most 100,000."""
    cpu_seconds: float


@attrs.define(eq=False)
class _Connection:
    """One stream: a request at a time, the next one as soon as the last one has been answered."""

    socket: socket.socket
    tail: bytes = b""
    done: bool = False
    began: float = 0.0
    times: list[float] = attrs.field(factory=list)


class WrongAnswer(Exception):
    """A server refused, closed the connection, or counts nothing."""


def run(load: Load) -> Seen:
    """Send everything and read everything.

    Raises:
        WrongAnswer: an answer isn't a whole stream.
    """
    if load.cores:
        os.sched_setaffinity(0, load.cores)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_connect(load)) for _ in range(load.streams)]
        return _exchange(opened, [_request(load, body) for body in load.bodies])


def _connect(load: Load) -> socket.socket:
    connected = socket.create_connection((load.host, load.port), timeout=60)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _exchange(opened: list[socket.socket], bodies: list[bytes]) -> Seen:
    requests = iter(bodies)
    poll = select.epoll()
    connections = {each.fileno(): _Connection(each) for each in opened}
    for each in opened:
        poll.register(each, select.EPOLLIN)
    tally = _Tally()
    cpu, began = time.process_time(), time.perf_counter()
    open_streams = sum(_send_next(each, requests) for each in connections.values())
    while open_streams:
        for descriptor, _ in poll.poll():
            connection = connections[descriptor]
            if tally.read(connection) and not _send_next(connection, requests):
                poll.unregister(descriptor)  # the server may close it
                open_streams -= 1
    duration = time.perf_counter() - began
    return tally.seen(duration, time.process_time() - cpu)


def _request(load: Load, body: str) -> bytes:
    head = (
        f"POST {load.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body.encode())}\r\n\r\n"
    )
    return (head + body).encode()


def _send_next(connection: _Connection, requests: Iterator[bytes]) -> bool:
    """Send the next request; False if there is none."""
    request = next(requests, None)
    if request is None:
        return False
    connection.tail, connection.done, connection.times = b"", False, []
    connection.began = time.perf_counter()
    connection.socket.sendall(request)
    return True


@attrs.define(eq=False)
class _Tally:
    tokens: int = 0
    events: int = 0
    answers: int = 0
    ttft: list[float] = attrs.field(factory=list)
    gaps: list[float] = attrs.field(factory=list)

    def read(self, connection: _Connection) -> bool:
        """Take what has come; True if that ends the answer."""
        data = connection.socket.recv(_READ)
        if not data:
            raise WrongAnswer(f"the server closed a connection after {connection.tail!r}")
        if not connection.times:
            # The head may come by itself; nothing counts before the first event.
            head = connection.tail + data
            if _EVENT not in head:
                whole = len(head) >= len(_GOOD)
                if whole and head.startswith(b"HTTP/") and not head.startswith(_GOOD):
                    raise WrongAnswer(head[:500].decode(errors="replace"))
                connection.tail = head
                return False
            data = connection.tail + data
            connection.tail = b""
            self.ttft.append(time.perf_counter() - connection.began)
        connection.times.append(time.perf_counter())
        joined = connection.tail + data
        # Less one than the mark is long, so that no event is counted twice.
        self.events += joined.count(_EVENT) - connection.tail.count(_EVENT)
        if not connection.done and _DONE not in joined:
            connection.tail = joined[-400:]
            return False
        connection.done = True
        connection.tail = joined[-400:]
        if not joined.endswith(_LAST_CHUNK):
            return False
        self._end(connection, joined)
        return True

    def _end(self, connection: _Connection, last: bytes) -> None:
        counted = last.rpartition(_USAGE)[2].lstrip()
        digits = counted[: len(counted) - len(counted.lstrip(b"0123456789"))]
        if not digits:
            raise WrongAnswer(f"an answer named no token count: {last[-400:]!r}")
        self.tokens += int(digits)
        self.events -= 1
        self.answers += 1
        if len(self.gaps) < 100_000:
            self.gaps += [after - before for before, after in pairwise(connection.times)]

    def seen(self, duration: float, cpu_seconds: float) -> Seen:
        return Seen(
            duration=duration,
            requests=self.answers,
            tokens=self.tokens,
            events=self.events,
            ttft=self.ttft,
            gaps=self.gaps,
            cpu_seconds=cpu_seconds,
        )


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.write(msgspec.json.encode(run(load)).decode())


if __name__ == "__main__":
    main()
