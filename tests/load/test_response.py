"""The load generator's own reader of HTTP responses, held against h11."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.load.response import InvalidAnswer, ResponseReader

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
CUTS = st.lists(st.integers(1, 400), max_size=12)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["x-a", "Server", "content-type"]),
        st.text("abc;=/ 1", max_size=9).map(str.strip),
    ),
    max_size=4,
)


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def read(parts: Sequence[bytes], *, closed: bool = False) -> tuple[ResponseReader, bytes]:
    reader, body = ResponseReader(), b""
    for part in parts:
        body += reader.feed(part)
    if closed:
        body += reader.feed(b"")
    return reader, body


def written(status: int, headers: list[tuple[str, str]], bodies: list[bytes]) -> bytes:
    """Return the response as h11's server writes it."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    while server.next_event() is not h11.NEED_DATA:
        if server.their_state is h11.DONE:
            break
    data = server.send(h11.Response(status_code=status, headers=headers)) or b""
    for body in bodies:
        data += server.send(h11.Data(data=body)) or b""
    return data + (server.send(h11.EndOfMessage()) or b"")


def read_by_h11(data: bytes, *, closed: bool = False) -> tuple[int, bytes, bool]:
    """Status, body and whether the connection may be used again."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    if closed:
        client.receive_data(b"")
    status, body = 0, b""
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return status, body, client.their_state is h11.DONE
        assert event is not h11.NEED_DATA


@given(st.sampled_from([200, 404, 503]), HEADERS, BODIES, CUTS, st.booleans())
def test_chunked_answers_are_read_as_h11_reads_them(
    status: int, headers: list[tuple[str, str]], bodies: list[bytes], cuts: list[int], close: bool
) -> None:
    framing = [("transfer-encoding", "chunked")] + ([("connection", "close")] if close else [])
    data = written(status, headers + framing, bodies)
    reader, body = read(pieces(data, cuts))
    assert reader.ended
    assert (reader.status, body, reader.reusable) == read_by_h11(data) == (
        status, b"".join(bodies), not close
    )  # fmt: skip


@given(BODIES, CUTS)
def test_answers_with_a_length_are_read_as_h11_reads_them(
    bodies: list[bytes], cuts: list[int]
) -> None:
    length = str(sum(map(len, bodies)))
    data = written(200, [("content-length", length)], bodies)
    reader, body = read(pieces(data, cuts))
    assert reader.ended
    assert (reader.status, body, reader.reusable) == read_by_h11(data)


@given(BODIES, CUTS)
def test_answers_that_end_with_the_connection_are_read_as_h11_reads_them(
    bodies: list[bytes], cuts: list[int]
) -> None:
    data = b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n" + b"".join(bodies)
    reader, body = read(pieces(data, cuts), closed=True)
    assert reader.ended
    assert (reader.status, body, reader.reusable) == read_by_h11(data, closed=True)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"3;name=value\r\nabc\r\n0\r\n\r\n",
        HEAD + b"003 \r\nabc\r\n0\r\nx: y\r\nz: w\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\n" + HEAD
        + b"3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200\r\nTransfer-Encoding:chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
)  # fmt: skip
def test_odd_answers_are_read_byte_by_byte(data: bytes) -> None:
    for size in (1, 2, len(data)):
        reader, body = read([data[i : i + size] for i in range(0, len(data), size)])
        assert (reader.status, body, reader.ended) == (200, b"abc", True)
    assert read_by_h11(data)[:2] == (200, b"abc")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP/1.1 status line"),
        (b"HTTP/2 200 OK\r\n\r\n", "no HTTP/1.1 status line"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "no header"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "no length"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", "unknown encoding"),
        (HEAD + b"xyz\r\n", "no size of a chunk"),
        (HEAD + b"-1\r\n", "no size of a chunk"),
        (HEAD + b"1_0\r\n", "no size of a chunk"),
        (HEAD + b"3\r\nabcd\r\n", "longer than it says"),
        (HEAD + b"1" * 5000, "line between chunks is too long"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, "head is too long"),
    ],
)
def test_what_is_no_answer_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidAnswer, match=message):
        ResponseReader().feed(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        HEAD + b"3\r\nab",
        HEAD + b"3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab",
    ],
)
def test_an_answer_that_is_cut_off_is_refused(data: bytes) -> None:
    reader = ResponseReader()
    if data:
        reader.feed(data)
    with pytest.raises(InvalidAnswer, match="ended before"):
        reader.feed(b"")


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"])
def test_a_connection_with_more_on_it_than_the_answer_is_not_used_again(head: bytes) -> None:
    whole = b"3\r\nabc\r\n0\r\n\r\n" if head is HEAD else b"abc"
    reader, body = read([head + whole + b"HTTP/1.1 200 OK\r\n"])
    assert (body, reader.ended, reader.reusable) == (b"abc", True, False)


def test_an_answer_without_a_body_ends_with_its_head() -> None:
    for head in (b"HTTP/1.1 204 No\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        reader, body = read([head])
        assert (body, reader.ended, reader.reusable) == (b"", True, True)
