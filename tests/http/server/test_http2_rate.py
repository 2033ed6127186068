"""The meter of HTTP/2's frames: its arithmetic, without sockets."""

from __future__ import annotations

import pytest

from tests.support.h2_client import DATA, END_STREAM, FLOODS, PREFACE, frame, get
from trioserve.http.server.http2_rate import BURST, FrameRefused, Http2RateLimiter


def test_frames_are_found_however_they_are_cut() -> None:
    meter = Http2RateLimiter()
    data = PREFACE + get(1, end=False) + frame(DATA, b"\0" * 500, stream_id=1)
    with pytest.raises(FrameRefused, match="too many frames"):
        for byte in data + FLOODS["pings"] * (BURST + 1):
            meter.read(bytes([byte]), 0.0)


def test_the_stock_is_refilled_with_time() -> None:
    meter = Http2RateLimiter()
    meter.read(PREFACE, 0.0)
    for second in range(100):
        meter.read(FLOODS["pings"] * 100, float(second))
    with pytest.raises(FrameRefused):
        meter.read(FLOODS["pings"] * (BURST + 1), 100.0)


def test_window_updates_are_paid_for_by_what_was_sent() -> None:
    meter = Http2RateLimiter()
    meter.read(PREFACE, 0.0)
    for _ in range(10 * BURST):
        meter.note_data_sent()
        meter.read(FLOODS["window updates"] * 4, 0.0)
    with pytest.raises(FrameRefused, match="window updates"):
        meter.read(FLOODS["window updates"] * (BURST + 1), 0.0)


def test_requests_and_bodies_cost_nothing() -> None:
    meter = Http2RateLimiter()
    meter.read(PREFACE, 0.0)
    body = frame(DATA, b"x", stream_id=1) + frame(DATA, flags=END_STREAM, stream_id=1)
    for _ in range(3 * BURST):
        meter.read(get(1, end=False) + body, 0.0)
