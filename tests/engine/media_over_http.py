"""The frame of tests of media over HTTP: requests that are served, and others that are refused."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import trio

from tests.support.http_stub import http_client, server_config
from trioserve import Engine
from trioserve.http import create_app
from trioserve.http.server.server import serve_app

CHAT, NATIVE = "/v1/chat/completions", "/generate"
SAMPLING = {"max_new_tokens": 6, "temperature": 0}
FIRST = "messages[0].content[0]"
_COUNTS = ("audio_tokens", "image_tokens")

Posted = tuple[str, dict[str, Any]]
"""Path and body of a request."""
Refused = tuple[str, dict[str, Any], str, str]
"""Path and body of a request, and the field that the error names, and some of its words."""


def chat(*content: Any, role: str = "user") -> dict[str, Any]:
    messages = [{"role": role, "content": list(content)}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0}


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an engine in the block, and yield a client."""
    config = server_config()
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(serve_app, create_app(engine, config), config)
        async with http_client(address) as client:
            yield client
        nursery.cancel_scope.cancel()


async def assert_answered(
    client: httpx.AsyncClient, requests: Sequence[Posted], text: str, **counts: int
) -> None:
    """Assert that all replies have that text, and that a chat's usage has ``counts`` of media."""
    for path, body in requests:
        response = await client.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
        reply = response.json()
        if path == CHAT:
            assert reply["choices"][0]["message"]["content"] == text
            details = reply["usage"]["prompt_tokens_details"]
            assert {name: details[name] for name in _COUNTS if name in details} == counts
        else:
            (reply,) = reply if isinstance(reply, list) else [reply]
            assert reply["text"] == text


async def assert_refused(client: httpx.AsyncClient, requests: Sequence[Refused]) -> None:
    """Assert that all requests are refused, with the words that come with them."""
    for path, body, param, told in requests:
        response = await client.post(path, json=body)
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert error["param"] == param
        assert told in error["message"]
