"""Answers that clients leave unread: what they hold together, and what becomes of them."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import h2.settings
import pytest
import trio

from tests.support.h2_client import H2Client, h2_client
from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    served,
    words,
)
from tests.support.tls_certificates import make_authority
from trioserve.config import EngineConfig
from trioserve.http.api.openai.responses.turns import response_of
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
WHOLE = json.dumps({"prompt": "x"}).encode()
SIZE = 1 << 20


def long_answers() -> StubEngine:
    """Return an engine with answers that are too long for the system's buffers."""
    return StubEngine(script=lambda _: [Chunk("a" * SIZE, (97,), finish_reason="stop")])


def budget(size: int) -> dict[str, Any]:
    return {"engine": EngineConfig("m", max_total_stream_bytes=size)}


async def without_window(client: H2Client) -> None:
    """Let no body through from now on."""
    codes = h2.settings.SettingCodes
    client.connection.update_settings({codes.INITIAL_WINDOW_SIZE: 0})
    await client.flush()


async def test_one_stream_is_reset_and_the_others_go_on() -> None:
    async with served(long_answers(), **budget(5 * SIZE // 2)) as url, h2_client(url) as client:
        await without_window(client)
        first, second, third = (client.post(TEXT, WHOLE) for _ in range(3))
        await client.flush()
        with trio.fail_after(20):
            assert await client.response(first) == ("reset", b"")
        for stream_id in (second, third):
            client.connection.increment_flow_control_window(2 * SIZE, stream_id)
        client.connection.increment_flow_control_window(4 * SIZE)
        await client.flush()
        with trio.fail_after(20):
            bodies = await both(client, second, third)
        assert [len(body) > SIZE for body in bodies] == [True, True]


async def both(client: H2Client, *stream_ids: int) -> list[bytes]:
    """Return the bodies of several streams."""
    bodies = dict.fromkeys(stream_ids, b"")
    ended = set()
    async for event in client.events():
        stream_id = getattr(event, "stream_id", None)
        if stream_id in bodies and hasattr(event, "data"):
            bodies[stream_id] += event.data
        if type(event).__name__ == "StreamEnded":
            ended.add(stream_id)
        if ended == set(stream_ids):
            break
    return list(bodies.values())


async def test_a_connection_of_http1_is_ended() -> None:
    with captured_logs() as logs:
        async with served(long_answers(), **budget(SIZE)) as url:
            clients = []
            for number in range(3):
                client = await connect(url)
                clients.append(client)
                await client.send_all(8 * raw_request(WHOLE, path=TEXT))
                while sum(log["event"] == "an unread answer was cut off" for log in logs) < number:
                    await trio.sleep(0.01)
            async with http_client(url) as reader:
                assert len((await reader.post(TEXT, content=WHOLE)).content) > SIZE
            for client in clients:
                await client.aclose()


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_kept_response_is_read_as_it_was_answered(
    tmp_path: Path, http2: bool, with_tls: bool
) -> None:
    """Send its bytes from the memory in which they are kept."""
    authority = make_authority(tmp_path / "ca")
    certificate, key = authority.issue("server")
    tls = {"ssl_certfile": certificate, "ssl_keyfile": key} if with_tls else {}
    async with served(StubEngine(script=lambda _: words("a b")), **tls) as url:
        verify = ssl.create_default_context(cafile=authority.file)
        async with http_client(url, verify=verify, http2=http2, http1=not http2) as client:
            metadata = {str(number): "x" * 500 for number in range(16)}
            body = {"input": "x", "metadata": metadata}
            answer = await client.post("/v1/responses", json=body)
            kept = await client.get(f"/v1/responses/{answer.json()['id']}")
    assert kept.status_code == 200
    assert kept.content == answer.content


def test_the_bytes_of_a_kept_response_are_shared() -> None:
    turn = b'{"id": "a"}\n{"input": []}'
    view = response_of(turn)
    assert view.obj is turn
    assert bytes(view) == b'{"id": "a"}'
