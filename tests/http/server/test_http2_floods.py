"""HTTP/2 clients that flood the server with frames."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes

from tests.http.server.test_http2 import (
    TEXT,
    WHOLE,
    beside_a_bystander,
    bystander,
    error_of,
    goodbye,
    raw_client,
)
from tests.support.h2_client import (
    CONTINUATION,
    FLOODS,
    HEADERS,
    frame,
    get,
    h2_client,
    request_head,
)
from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    served,
)
from trioserve.http.server import http2_rate as frames
from trioserve.http.server.http2_rate import BURST
from trioserve.http.server.settings import MAX_FRAME_SIZE


@pytest.fixture
def no_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a slow machine lets no more through than a fast one does."""
    monkeypatch.setattr(frames, "_PER_SECOND", 0.0)


@pytest.mark.usefixtures("no_refill")
class TestFloods:
    @pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
    async def test_frames_without_use_end_the_connection(self, flood: bytes) -> None:
        with captured_logs() as logs:
            async with served(beside_a_bystander()) as url, bystander(url):
                async with raw_client(url, get(1, end=False) + flood * (BURST // 2)) as client:
                    await trio.sleep(0.05)
                    await client.send_all(flood * 2 * BURST)
                    assert await goodbye(client) == ErrorCodes.ENHANCE_YOUR_CALM
        assert "an HTTP/2 client was cut off" in [entry["event"] for entry in logs]

    async def test_rapid_resets_leave_nothing_behind(self) -> None:
        stub = beside_a_bystander()
        with captured_logs():
            async with served(stub) as url, bystander(url), h2_client(url) as client:
                with contextlib.suppress(trio.BrokenResourceError):
                    for _ in range(20):
                        for _ in range(100):
                            client.connection.reset_stream(client.post(TEXT, WHOLE))
                        await client.flush()
                assert await error_of(client, -1) is ErrorCodes.ENHANCE_YOUR_CALM
                with trio.fail_after(20):
                    for call in stub.calls[1:]:
                        await call.left.wait()
        assert len(stub.calls) <= BURST + 2

    async def test_requests_that_are_refused_count_as_well(self) -> None:
        with captured_logs():
            async with served(StubEngine()) as url, raw_client(url, b"") as client:
                flood = b"".join(
                    frame(HEADERS, request_head("bad"), flags=5, stream_id=stream_id)
                    for stream_id in range(1, 4 * BURST, 2)
                )
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_send_until_closed, client, flood)
                    with trio.fail_after(20):
                        assert await goodbye(client) == ErrorCodes.ENHANCE_YOUR_CALM

    async def test_a_head_in_ever_more_pieces(self) -> None:
        with captured_logs():
            async with served(beside_a_bystander()) as url, bystander(url):
                piece = frame(CONTINUATION, bytes(MAX_FRAME_SIZE), stream_id=1)
                head = frame(HEADERS, stream_id=1) + piece * 5
                async with raw_client(url, head) as client:
                    assert await goodbye(client) == ErrorCodes.ENHANCE_YOUR_CALM

    async def test_a_client_that_does_not_read_its_answers(self) -> None:
        """Bound the acknowledgements that it makes the server send, too."""
        with captured_logs():
            async with served(beside_a_bystander()) as url, bystander(url):
                async with raw_client(url, b"") as client:
                    with trio.fail_after(20):
                        await _send_until_closed(client, FLOODS["pings"] * 100_000)


async def _send_until_closed(client: trio.SocketStream, data: bytes) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await client.send_all(data)
