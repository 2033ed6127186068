"""Clients that fill a server with connections and answers that wait for them.

What scales: a server takes up to 4096 connections; here it may have few files open, which lowers
that to 128. Unread answers have 256 MiB; here they have 32 MiB.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import hpack
import pytest

from tests.attacks.siege import MAX_MEMORY, Victim, besieged
from tests.attacks.witness import HEADERS
from tests.support.h2_client import END_HEADERS, END_STREAM, PREFACE, SETTINGS, frame
from tests.support.h2_client import HEADERS as HEADERS_FRAME

NUM_CONNECTIONS = 128
BUDGET = 32 * 2**20
NO_WINDOW = frame(SETTINGS, bytes([0, 4, 0, 0, 0, 0]))
"""A client's settings that let no answer's body through."""


@pytest.fixture(scope="module")
def small_victim() -> Iterator[Victim]:
    """A server that takes few connections, and has little room for unread answers."""
    budget = ("--max-total-stream-bytes", str(BUDGET))
    with besieged("--mock-worker", "5ms", *budget, num_files=2 * NUM_CONNECTIONS) as victim:
        yield victim


def get(path: str, *stream_ids: int) -> bytes:
    """Return frames that ask for ``path`` on each of the streams of a connection."""
    encoder = hpack.Encoder()
    headers = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost")]
    headers += [(":path", path), ("authorization", "Bearer secret")]
    flags = END_HEADERS | END_STREAM
    return b"".join(
        frame(HEADERS_FRAME, encoder.encode(headers), flags=flags, stream_id=each)
        for each in stream_ids
    )


def unread_over_http2(address: tuple[str, int]) -> socket.socket:
    """Connect, and ask for an answer that the window doesn't let through."""
    client = socket.create_connection(address)
    client.sendall(PREFACE + NO_WINDOW + get("/v1/models", 1))
    return client


def unread_over_http1(address: tuple[str, int]) -> socket.socket:
    """Connect, and ask for more than the system's buffers take, without reading."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    request = (
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n"
    )
    client.sendall(8 * request)
    return client


def slow_body(address: tuple[str, int]) -> socket.socket:
    """Connect, and send a request but for the last byte of its body."""
    client = socket.create_connection(address)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{"
    )
    return client


def is_open(client: socket.socket) -> bool:
    """Return whether the server hasn't ended the connection; what it says is left unread."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return not poll.poll(0)


@pytest.mark.parametrize("connect", [unread_over_http2, unread_over_http1, slow_body])
def test_more_connections_than_there_may_be_that_all_wait_for_their_clients(
    small_victim: Victim, connect: Callable[[tuple[str, int]], socket.socket]
) -> None:
    address = urlsplit(small_victim.url)
    target = (address.hostname or "", address.port or 0)
    with small_victim.withstands(), contextlib.ExitStack() as stack:
        clients: list[socket.socket] = []
        num_evicted = 0
        while num_evicted < NUM_CONNECTIONS // 2:
            clients.append(stack.enter_context(connect(target)))
            num_evicted += sum(not is_open(client) for client in clients)
            clients = [client for client in clients if is_open(client)]
            assert len(clients) < 3 * NUM_CONNECTIONS, "none of them made room"
            time.sleep(0.02)


def test_large_answers_that_nobody_reads(small_victim: Victim) -> None:
    address = urlsplit(small_victim.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=60)
    connection.request("GET", "/openapi.json", headers=HEADERS)
    size = len(connection.getresponse().read())
    connection.close()
    num_clients = (MAX_MEMORY + 4 * BUDGET) // (size * 64) + 1
    with small_victim.withstands(), contextlib.ExitStack() as stack:
        for _ in range(num_clients):
            client = stack.enter_context(
                socket.create_connection((address.hostname or "", address.port or 0))
            )
            client.sendall(PREFACE + NO_WINDOW + get("/openapi.json", *range(1, 129, 2)))
            time.sleep(0.3)
        time.sleep(1)
