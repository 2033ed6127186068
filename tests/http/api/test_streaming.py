"""Streams over sockets: when the 200 goes out, silence, and clients that leave at every stage."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.support.http_stub import (
    Call,
    StubEngine,
    captured_logs,
    client_of,
    connect,
    http_client,
    raw_request,
    read_until,
    served,
    standstill,
    words,
)
from trioserve.protocol.errors import EngineError, QueueFull
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
FLOOD = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]


def body(prompt: Any = "x", *, stream: bool = True) -> bytes:
    return json.dumps({"prompt": prompt, "stream": stream}).encode()


async def test_the_200_goes_out_with_the_admission_and_before_the_first_token() -> None:
    admitted = trio.Event()
    stub = StubEngine(admit=lambda _: admitted.wait(), script=lambda _: [math.inf])
    async with served(stub) as url, await connect(url) as client:
        await client.send_all(raw_request(body(), path=TEXT))
        with trio.move_on_after(0.1) as too_early:
            await client.receive_some()
        assert too_early.cancelled_caught
        admitted.set()
        head = await read_until(client, b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"text/event-stream" in head
        assert b"no-cache" in head
        assert b"x-accel-buffering: no" in head.lower()


async def test_comments_keep_a_silent_stream_alive() -> None:
    come = trio.Event()
    stub = StubEngine(script=lambda _: [come, *words("late")])
    async with served(stub, keep_alive_interval=0.1) as url, await connect(url) as client:
        await client.send_all(raw_request(body(), path=TEXT, close=True))
        answer = b""
        while answer.count(b": keep-alive\n\n") < 3:
            answer += await client.receive_some()
        assert b"data: " not in answer
        come.set()
        rest = await read_until(client, b"data: [DONE]\n\n")
    assert b'"text":"late"' in rest


async def test_no_comments_while_chunks_come() -> None:
    pieces = [step for letter in "abc" for step in (0.5, Chunk(letter, (97,)))]
    stub = StubEngine(script=lambda _: [*pieces, *words("d")])
    async with served(stub, keep_alive_interval=1.4) as url, http_client(url) as client:
        response = await client.post(TEXT, content=body())
    assert "keep-alive" not in response.text


def _close(client: trio.SocketStream) -> None:
    client.socket.close()


def _reset(client: trio.SocketStream) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.socket.close()


def _half_close(client: trio.SocketStream) -> None:
    client.socket.shutdown(socket.SHUT_WR)


async def _left(stub: StubEngine, count: int) -> None:
    """Wait until each of ``count`` generations has been left."""
    assert len(stub.calls) == count
    for call in stub.calls:
        await call.left.wait()


@pytest.mark.parametrize("leave", [_close, _reset, _half_close])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("stage", ["admission", "silent", "between chunks", "not streaming"])
async def test_a_client_that_leaves(
    stage: str, prompt: Any, leave: Callable[[trio.SocketStream], None]
) -> None:
    never = trio.Event()
    stub = StubEngine(
        admit=(lambda _: never.wait()) if stage == "admission" else None,
        script=lambda _: [*([Chunk("a", (97,))] if stage == "between chunks" else []), math.inf],
    )
    with captured_logs() as logs:
        async with served(stub) as url:
            client = await connect(url)
            request = body(prompt, stream=stage != "not streaming")
            await client.send_all(raw_request(request, path=TEXT))
            if stage == "between chunks":
                await read_until(client, b'"text":"a"')
            elif stage == "silent":
                await read_until(client, b"\r\n\r\n")
            else:
                while len(stub.calls) < (1 if prompt == "x" else 2):
                    await trio.sleep(0.01)
            assert not any(call.left.is_set() for call in stub.calls)
            leave(client)
            with trio.fail_after(20):
                await _left(stub, 1 if prompt == "x" else 2)
            while not logs:
                await trio.sleep(0.01)
            await client.aclose()
    assert all(isinstance(call.scope_error, trio.Cancelled) for call in stub.calls)
    (line,) = logs
    assert (line["status"], line["reason"]) == (499, "client_disconnected")
    assert stub.metrics.http_responses == {("POST", TEXT, 499): 1}


@pytest.mark.parametrize("leave", [_close, _reset, _half_close])
async def test_a_client_that_leaves_while_it_is_written_to(
    leave: Callable[[trio.SocketStream], None],
) -> None:
    stub = StubEngine(script=lambda _: list(FLOOD))
    async with served(stub) as url:
        client = await connect(url)
        await client.send_all(raw_request(body(), path=TEXT))
        await read_until(client, b"aaa")
        await standstill(stub)
        assert not stub.calls[0].left.is_set()
        leave(client)
        with trio.fail_after(20):
            await stub.calls[0].left.wait()
        await client.aclose()


@pytest.mark.parametrize("trailing", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_a_client_that_leaves_behind_a_pipelined_request(trailing: bytes) -> None:
    """Notice the disconnect while the reader is parked on bytes that the client sent too early."""
    stub = StubEngine(script=lambda _: [math.inf])
    async with served(stub) as url:
        client = await connect(url)
        await client.send_all(raw_request(body(), path=TEXT) + trailing)
        await read_until(client, b"\r\n\r\n")
        await client.aclose()
        with trio.fail_after(20):
            await stub.calls[0].left.wait()


async def test_a_batch_is_all_or_nothing() -> None:
    async def admit(call: Call) -> None:
        if call.options["request_id"].endswith("-2"):
            raise QueueFull("3 requests are waiting")

    stub = StubEngine(admit=admit, script=lambda _: [math.inf])
    for stream in (False, True):
        request = {"prompt": ["a", "b", "c"], "stream": stream}
        response = await client_of(stub).post(TEXT, json=request)
        assert response.status_code == 429
    assert len(stub.calls) == 6
    assert all(call.left.is_set() for call in stub.calls)


async def test_one_failure_ends_a_batch() -> None:
    def script(call: Call) -> list[Any]:
        if call.options["request_id"].endswith("-1"):
            return [0.05, EngineError("broken")]
        return [Chunk("a", (97,)), math.inf]

    stub = StubEngine(script=script)
    request = {"prompt": ["a", "b"], "stream": True}
    with trio.fail_after(20):
        response = await client_of(stub).post(TEXT, json=request)
        text = await response.get_data(True)
    assert '"text":"a"' in text
    assert '"code":"engine_error"' in text
    assert all(call.left.is_set() for call in stub.calls)
    assert isinstance(stub.calls[0].scope_error, trio.Cancelled)


async def test_the_reader_of_a_batch_holds_its_generations_back() -> None:
    """Keep tasks from running ahead of the reader: chunks wait in the bounded streams."""
    stub = StubEngine(script=lambda _: list(FLOOD))
    async with served(stub) as url:
        client = await connect(url)
        await client.send_all(raw_request(body(["x", "y"]), path=TEXT))
        await read_until(client, b"aaa")
        for produced in await standstill(stub, 2):
            assert 0 < produced < len(FLOOD) // 2
        await client.aclose()
        with trio.fail_after(20):
            await _left(stub, 2)
