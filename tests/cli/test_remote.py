"""A server that is asked for one thing at a time, and a chat with it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import AsyncIterator
from typing import Any

import h11
import pytest
import trio

from tests.support.load_server import CUT, DONE, FakeServer, Script, event, usage
from trioserve.cli.chat import chat
from trioserve.cli.chat_backends import ServerChatBackend, find_server
from trioserve.cli.conversation import ChatConversation
from trioserve.cli.terminal import Terminal
from trioserve.load.events import MAX_EVENT_BYTES, Event, EventReader
from trioserve.load.remote import RefusedRequest, Remote, RemoteError
from trioserve.load.response import InvalidAnswer

EVENTS = (
    b": hi\r\n\r\nevent: one\ndata: 1\n\ndata:2\ndata:  3\r\n\r\n"
    b"id: 7\n\nevent: none\n\ndata: 4\n\ndata"
)


def delta(finish_reason: str | None = None, **fields: str) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


@contextlib.asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncIterator[tuple[Remote, FakeServer]]:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, lambda _: script, **options)
        headers = {"Authorization": "Bearer key"}
        yield (
            Remote(connect=server.connect, host="h", url="http://h", headers=headers),
            server,
        )
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_from_any_pieces(size: int) -> None:
    reader = EventReader()
    events = [
        found
        for start in range(0, len(EVENTS), size)
        for found in reader.feed(EVENTS[start : start + size])
    ]
    assert events == [Event("one", b"1"), Event("message", b"2\n 3"), Event("message", b"4")]


def test_an_event_without_end_is_refused() -> None:
    reader = EventReader()
    piece = b"data: " + b"x" * (MAX_EVENT_BYTES // 4) + b"\n"
    with pytest.raises(InvalidAnswer, match="too long"):
        for _ in range(5):
            reader.feed(piece)


async def test_a_whole_answer() -> None:
    async with serving([(0, b"all "), (0, b"of it")]) as (remote, server):
        answer = await remote.get("/path")
    assert (answer.status, answer.body) == (200, b"all of it")
    request: h11.Request = server.requests[0][0]
    assert (request.method, request.target) == (b"GET", b"/path")
    assert {(b"host", b"h"), (b"authorization", b"Bearer key")} <= set(request.headers)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"secrets", "http://h refuses with 401: give the right --api-key"),
        (400, b'{"error": {"message": "too\\nlong"}}', "http://h refuses with 400: too long"),
        (500, b"\x1b[31m oops \xff", "http://h refuses with 500: \\\\x1b\\[31m oops \ufffd"),
        (404, b"", "http://h refuses with 404$"),
    ],
)
async def test_a_refusal_is_one_line(status: int, body: bytes, message: str) -> None:
    async with serving([(0, body)], status=status) as (remote, _):
        with pytest.raises(RefusedRequest, match=message) as refused:
            async with remote.events("/path", {"a": 1}):
                raise AssertionError("there are no events")
    assert refused.value.status == status


async def test_a_connection_that_breaks_is_told(autojump_clock: trio.testing.MockClock) -> None:
    async with serving([(0, b"data: 1\n\n"), (1, CUT)]) as (remote, _):
        async with remote.events("/path") as events:
            assert await anext(events) == Event("message", b"1")
            with pytest.raises(RemoteError, match="the connection ended before the answer did"):
                await anext(events)

    async def refuse() -> trio.abc.Stream:
        raise OSError("nobody there")

    remote = Remote(connect=refuse, host="h", url="http://h")
    with pytest.raises(RemoteError, match="http://h can't be reached: nobody there"):
        await remote.get("/")

    async def hang() -> trio.abc.Stream:
        await trio.sleep_forever()
        raise AssertionError

    with pytest.raises(RemoteError, match="http://h doesn't answer within 30 s"):
        await Remote(connect=hang, host="h", url="http://h").get("/")


async def test_the_models_of_a_server() -> None:
    listed = b'{"data": [{"id": "first", "max_model_len": 99}, {"id": "second"}]}'
    async with serving([(0, listed)]) as (remote, server):
        first = await find_server(remote, "/v1", None)
        second = await find_server(remote, "/v1", "second")
        with pytest.raises(RemoteError, match="has no model third; it has first, second"):
            await find_server(remote, "/v1", "third")
    assert (first.name, first.max_model_len) == ("first", 99)
    assert (second.name, second.max_model_len) == ("second", None)
    assert server.requests[0][0].target == b"/v1/models"
    for body, message in ((b'{"data": []}', "lists no models"), (b"<html>", "no list of models")):
        async with serving([(0, body)]) as (remote, _):
            with pytest.raises(RemoteError, match=message):
                await find_server(remote, "/v1", None)


async def talk(server: Remote, lines: str, **conversation: Any) -> tuple[str, str]:
    """Return what a piped chat writes, and what it notes."""
    reader, writer = os.pipe()
    stdout, stderr = io.StringIO(), io.StringIO()
    with open(reader) as stdin:
        with open(writer, "wb") as end:
            end.write(lines.encode())
        terminal = Terminal(stdin, stdout, stderr)
        backend = ServerChatBackend(server, "/v1", "m", 100)
        await chat(backend, ChatConversation(**conversation), terminal=terminal)
    return stdout.getvalue(), stderr.getvalue()


async def test_a_chat_with_a_server() -> None:
    reply: Script = [
        (0, delta(role="assistant", content="")),
        (0, delta(reasoning_content="hm", reasoning="hm")),
        (0, delta(content="Hello") + delta(content=" you")),
        (0, delta("length", content="")),
        (0, usage(20, 7)),
        (0, DONE),
    ]
    async with serving(reply) as (remote, server):
        fields = {"max_tokens": 7, "stop": ("END",)}
        told, noted = await talk(remote, "one\ntwo\n", system="Be brief.", fields=fields)
    assert told == 2 * "hm\n\nHello you\n"
    assert noted.count("[7 tokens, ") == noted.count("context 27 of 100, ended by length]") == 2
    (_, first), (request, second) = server.requests
    assert request.target == b"/v1/chat/completions"
    assert second == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Hello you"},
            {"role": "user", "content": "two"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 7,
        "stop": ["END"],
    }
    assert first["messages"] == second["messages"][:2]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(0, delta(content="a")), (0, event(error={"message": "worker lost"}))], "worker lost"),
        ([(0, b"data: {\n\n")], "the server's reply isn't understood"),
    ],
)
async def test_a_reply_that_fails_ends_a_piped_chat(script: Script, message: str) -> None:
    async with serving(script) as (remote, _):
        with pytest.raises(RemoteError, match=message):
            await talk(remote, "one\n")
