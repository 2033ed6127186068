"""Bytes of all kinds to one live server: it goes on, and keeps nothing of their senders."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import hpack
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    served,
    words,
)

TEXT = "/v1/completions"
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
WHOLE = json.dumps({"prompt": "x"}).encode()

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADES = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
)
VALID = (
    raw_request(STREAM, path=TEXT),
    raw_request(WHOLE, path=TEXT, close=True),
    raw_request(WHOLE, path=TEXT).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n", 1),
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
    b"HEAD /health HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    CHUNKED + b"%x\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(WHOLE), WHOLE),
    *UPGRADES,
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = bytes(
    hpack.Encoder().encode(
        [(":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", TEXT)]
    )
)
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
REQUEST = (
    len(HEAD).to_bytes(3, "big")
    + bytes([1, 4, 0, 0, 0, 1])
    + HEAD
    + len(STREAM).to_bytes(3, "big")
    + bytes([0, 1, 0, 0, 0, 1])
    + STREAM
)
STRANGE = (b"\r\n", b"\n", b"\0", b"\xff", b":", b" ", b"0\r\n\r\n", b"-1", b"HTTP/1.1", b"\r\n ")

positions = st.integers(0, 1 << 10)
edits = st.tuples(
    st.sampled_from(["insert", "delete", "flip", "repeat", "cut"]),
    positions,
    st.one_of(st.sampled_from(STRANGE), st.binary(min_size=1, max_size=20)),
)
frames = st.builds(
    lambda kind, flags, stream_id, payload: (
        len(payload).to_bytes(3, "big")
        + bytes([kind, flags])
        + stream_id.to_bytes(4, "big")
        + payload
    ),
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 9, 13, 32, 45, 255]),
    st.sampled_from([0, 1, 1, 1, 2, 3, 5, 7, (1 << 31) - 1, (1 << 32) - 1]),
    st.one_of(
        st.just(HEAD),
        st.just(WHOLE),
        st.sampled_from([b"", bytes(4), bytes(6), bytes(8), b"\x7f\xff\xff\xff", bytes(17)]),
        st.binary(max_size=40),
    ),
)


def edited(data: bytes, changes: list[Any]) -> bytes:
    for kind, where, piece in changes:
        at = where % (len(data) + 1)
        if kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(piece) :]
        elif kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ piece[0]]) + data[at + 1 :]
        elif kind == "repeat":
            data = data[:at] + data[max(0, at - 40) : at] * 3 + data[at:]
        elif kind == "cut":
            data = data[:at]
    return data


http1 = st.builds(
    lambda requests, changes: edited(b"".join(requests), changes),
    st.lists(st.sampled_from(VALID), min_size=1, max_size=3),
    st.lists(edits, max_size=5),
)
http2 = st.builds(
    lambda first, pieces, changes: PREFACE + first + edited(b"".join(pieces), changes),
    st.sampled_from([b"", SETTINGS]),
    st.lists(st.one_of(frames, st.just(REQUEST)), max_size=8),
    st.lists(edits, max_size=2),
)
leaving = st.sampled_from(["close", "half-close", "wait"])


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(st.lists(st.tuples(st.one_of(http1, http2, st.binary()), leaving), min_size=10, max_size=40))
def test_no_bytes_end_the_server_or_stay_on_it(visits: list[tuple[bytes, str]]) -> None:
    trio.run(_visited, visits)


async def _visited(visits: list[tuple[bytes, str]]) -> None:
    stub = StubEngine(script=lambda _: [0.01, *words("a")])
    with captured_logs() as logs, trio.fail_after(60):
        # So long that a request which comes whole is in time on a machine that is very busy.
        async with served(stub, request_timeout=1.5, max_body_size=1000) as url:
            files = len(os.listdir("/proc/self/fd"))
            async with trio.open_nursery() as nursery:
                for data, end in visits:
                    nursery.start_soon(_visit, url, data, end)
            for call in stub.calls:
                await call.left.wait()
            while len(os.listdir("/proc/self/fd")) > files:
                await trio.sleep(0.005)
            async with http_client(url) as client:
                assert (await client.get("/health")).status_code == 200
                answer = await client.post(TEXT, content=WHOLE)
            assert answer.json()["choices"][0]["text"] == "a"
    assert [entry for entry in logs if entry["level"] == "ERROR"] == []
    assert [entry for entry in logs if entry["event"] == "a connection was dropped"] == []


async def _visit(url: str, data: bytes, end: str) -> None:
    async with await connect(url) as client:
        with contextlib.suppress(trio.BrokenResourceError):
            await client.send_all(data)
            if end == "half-close":
                await client.send_eof()
            if end != "close":
                with trio.move_on_after(0.02):
                    while await client.receive_some():
                        pass
