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

_GOOD, _EVENT, _DONE = b"HTTP/1.1 200", b"data: {", b"data: [DONE]"
_LAST_CHUNK, _USAGE = b"0\r\n\r\n", b'"completion_tokens":'
_READ, _MOST_GAPS = 1 << 16, 100_000


@attrs.frozen(kw_only=True)
class Load:
    """JSON texts of requests, each sent once, over ``streams`` connections, on ``cores`` if any."""

    host: str
    port: int
    path: str
    streams: int
    bodies: list[str]
    cores: list[int]


@attrs.define(kw_only=True)
class Seen:
    """The answers; times are seconds, of the client's processor time too.

    ``tokens`` are those that the server counts. ``events`` are those with JSON in them, less each
    answer's last, which only has the usage. ``gaps`` lie between reads of one answer, a sample.
    """

    duration: float = 0.0
    requests: int = 0
    tokens: int = 0
    events: int = 0
    ttft: list[float] = attrs.field(factory=list)
    gaps: list[float] = attrs.field(factory=list)
    cpu_seconds: float = 0.0


@attrs.define(eq=False)
class _Connection:
    """One stream: a request at a time, the next one as soon as the last one has been answered."""

    socket: socket.socket
    tail: bytes = b""
    done: bool = False
    began: float = 0.0
    times: list[float] = attrs.field(factory=list)

    def send_next(self, requests: Iterator[bytes]) -> bool:
        """Send the next request; return False if there is none."""
        request = next(requests, None)
        if request is None:
            return False
        self.tail, self.done, self.times = b"", False, []
        self.began = time.perf_counter()
        self.socket.sendall(request)
        return True


class WrongAnswer(Exception):
    """A server refused, closed the connection, or counts nothing."""


def run(load: Load) -> Seen:
    """Send and read everything; raise :class:`WrongAnswer` of a stream that isn't whole."""
    if load.cores:
        os.sched_setaffinity(0, load.cores)
    poll, seen = select.epoll(), Seen()
    requests = iter([http1_request(load.path, body) for body in load.bodies])
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_connect(load)) for _ in range(load.streams)]
        connections = {each.fileno(): _Connection(each) for each in opened}
        for each in opened:
            poll.register(each, select.EPOLLIN)
        cpu, began = time.process_time(), time.perf_counter()
        open_streams = sum(each.send_next(requests) for each in connections.values())
        while open_streams:
            for descriptor, _ in poll.poll():
                connection = connections[descriptor]
                if _read(connection, seen) and not connection.send_next(requests):
                    poll.unregister(descriptor)  # the server may close it
                    open_streams -= 1
        seen.duration, seen.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return seen


def _connect(load: Load) -> socket.socket:
    connected = socket.create_connection((load.host, load.port), timeout=60)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def http1_request(path: str, body: str) -> bytes:
    """Return a POST of JSON."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body.encode())}\r\n\r\n"
    )
    return (head + body).encode()


def _read(connection: _Connection, seen: Seen) -> bool:
    """Take what has come; return True if that ends the answer."""
    data = connection.socket.recv(_READ)
    if not data:
        raise WrongAnswer(f"the server closed a connection after {connection.tail!r}")
    if not connection.times:
        # The head may come by itself; nothing counts before the first event.
        data = connection.tail + data
        connection.tail = b""
        if _EVENT not in data:
            whole = len(data) >= len(_GOOD)
            if whole and data.startswith(b"HTTP/") and not data.startswith(_GOOD):
                raise WrongAnswer(data[:500].decode(errors="replace"))
            connection.tail = data
            return False
        seen.ttft.append(time.perf_counter() - connection.began)
    connection.times.append(time.perf_counter())
    joined = connection.tail + data
    # Less the tail's own, so that no event is counted twice.
    seen.events += joined.count(_EVENT) - connection.tail.count(_EVENT)
    connection.done = connection.done or _DONE in joined
    connection.tail = joined[-400:]
    if not connection.done or not joined.endswith(_LAST_CHUNK):
        return False
    counted = joined.rpartition(_USAGE)[2].lstrip()
    digits = counted[: len(counted) - len(counted.lstrip(b"0123456789"))]
    if not digits:
        raise WrongAnswer(f"an answer named no token count: {joined[-400:]!r}")
    seen.tokens += int(digits)
    seen.events -= 1
    seen.requests += 1
    if len(seen.gaps) < _MOST_GAPS:
        seen.gaps += [after - before for before, after in pairwise(connection.times)]
    return True


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.write(msgspec.json.encode(run(given)).decode())
