"""HTTP/2 clients that spend little and let the server spend much."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import hpack
import pytest

from tests.attacks.siege import Victim
from tests.attacks.test_connections import NO_WINDOW, get
from tests.support.h2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)


@contextlib.contextmanager
def connected(victim: Victim, first: bytes = PREFACE + frame(SETTINGS)) -> Iterator[socket.socket]:
    address = urlsplit(victim.url)
    with socket.create_connection((address.hostname or "", address.port or 0), 60) as client:
        client.sendall(first)
        yield client


def frames_of(client: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and payload of each frame that comes, until the connection ends."""
    data = b""
    while True:
        try:
            more = client.recv(1 << 16)
        except ConnectionError:
            return
        if not more:
            return
        data += more
        while len(data) >= 9 and len(data) >= 9 + int.from_bytes(data[:3], "big"):
            end = 9 + int.from_bytes(data[:3], "big")
            yield data[3], data[4], data[9:end]
            data = data[end:]


def setting(code: int, value: int) -> bytes:
    return code.to_bytes(2, "big") + value.to_bytes(4, "big")


def sends_until_cut_off(client: socket.socket, pieces: Callable[[int], bytes]) -> int:
    """Send pieces until the server ends the connection; return how many were sent."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    for number in range(100_000):
        try:
            client.sendall(pieces(number))
        except ConnectionError:
            return number
        if poll.poll(1):
            return number
    raise AssertionError("the connection went on")


def test_the_table_of_headers_stays_small_whatever_a_client_allows(victim: Victim) -> None:
    """Each answer's headers are new, so that a table without a bound would keep them all."""
    encoder, decoder = hpack.Encoder(), hpack.Decoder()
    decoder.max_allowed_table_size = 1 << 30
    large = frame(SETTINGS, setting(1, (1 << 32) - 1))
    answered = 0
    with victim.withstands(), connected(victim, PREFACE + large) as client:
        for number in range(200):
            headers = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost")]
            headers += [(":path", "/health"), ("x-request-id", f"{number:0100}")]
            payload = encoder.encode(headers)
            flags = END_HEADERS | END_STREAM
            client.sendall(frame(HEADERS, payload, flags=flags, stream_id=2 * number + 1))
            time.sleep(0.002)
        for kind, _, payload in frames_of(client):
            if kind == HEADERS:
                decoder.decode(payload)
                answered += 1
                if answered == 200:
                    break
    table = decoder.header_table
    assert sum(len(name) + len(value) + 32 for name, value in table.dynamic_entries) <= 4096


def test_settings_with_numbers_that_mean_nothing(victim: Victim) -> None:
    """h2 would keep something for each number."""
    numbers = range(0x100, 0x10000)
    each = [numbers[start : start + 2700] for start in range(0, len(numbers), 2700)]
    frames = [frame(SETTINGS, b"".join(setting(code, 1) for code in part)) for part in each]
    with victim.withstands(), contextlib.ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(connected(victim))
            with contextlib.suppress(ConnectionError):
                client.sendall(b"".join(frames))
            acknowledged = (1 for kind, flags, _ in frames_of(client) if (kind, flags) == (4, 1))
            for _ in range(1 + len(frames)):
                next(acknowledged, None)


def test_an_answer_that_is_let_through_byte_by_byte(victim: Victim) -> None:
    one_byte = bytes([0, 0, 0, 1])
    dribble = frame(WINDOW_UPDATE, one_byte, stream_id=1)
    with victim.withstands(), connected(victim, PREFACE + NO_WINDOW) as client:
        client.sendall(get("/openapi.json", 1))
        assert sends_until_cut_off(client, lambda _: dribble) < 5000


@pytest.mark.parametrize(
    "piece",
    [
        lambda n: (
            get("/v1/models", 2 * n + 1)
            + frame(RST_STREAM, bytes([0, 0, 0, 8]), stream_id=2 * n + 1)
        ),
        # The server resets these: an update past the largest window is a stream's error.
        lambda n: (
            get("/v1/models", 2 * n + 1)
            + frame(WINDOW_UPDATE, bytes([0x7F, 0xFF, 0xFF, 0xFF]), stream_id=2 * n + 1)
        ),
    ],
    ids=["by the client", "by the server"],
)
def test_rapid_resets(victim: Victim, piece: Callable[[int], bytes]) -> None:
    with victim.withstands(), connected(victim) as client:
        assert sends_until_cut_off(client, piece) < 10_000


def test_a_head_in_ever_more_pieces(victim: Victim) -> None:
    with victim.withstands(), connected(victim) as client:
        client.sendall(frame(HEADERS, b"", stream_id=1))
        dribble = frame(CONTINUATION, b"\x00\x01a\x01b", stream_id=1)
        assert sends_until_cut_off(client, lambda _: 20 * dribble) < 5000


def test_one_header_that_is_meant_thousands_of_times(victim: Victim) -> None:
    """4 KiB in the table, and a head of references to it that would be 200 MiB."""
    encoder = hpack.Encoder()
    large = encoder.encode([(":method", "GET"), ("x", "y" * 4000)])
    bomb = large + b"\xbe" * 15_000
    with victim.withstands(), contextlib.ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(connected(victim))
            flags = END_HEADERS | END_STREAM
            client.sendall(frame(HEADERS, bomb, flags=flags, stream_id=1))
            assert list(frames_of(client))


def test_pieces_of_a_body_that_are_all_padding(victim: Victim) -> None:
    padded, nothing = 8, bytes([10]) + bytes(10)
    with victim.withstands(), connected(victim) as client:
        client.sendall(get("/v1/models", 1).replace(b"\x01\x05", b"\x01\x04", 1))
        piece = frame(DATA, nothing, flags=padded, stream_id=1)
        assert sends_until_cut_off(client, lambda _: 20 * piece) < 5000
