"""The peers' application: the same events at the same pace, the bytes of each made beforehand.

Run with uvicorn in the peers' environment, which has nothing of the project's. ``raw`` is an ASGI
application without a framework, ``framework`` Starlette's streaming response. Both are woken for a
token in the cheapest way there is, and neither encodes anything.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

_CHUNK = {
    "id": "0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "fake",
    "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}],
}
EVENT = b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n"


class Ticker:
    """Wakes all streams for each token."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Return a future that ends with the next token."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._interval, loop.time())
            await asyncio.sleep(due - loop.time())
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


ticker = Ticker(float(os.environ.get("BENCH_INTERVAL", "0.02")))


async def raw(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer every request with a stream that doesn't end."""
    if scope["type"] != "http":
        return
    if scope["method"] == "GET":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    more = True
    while more:
        more = (await receive())["more_body"]
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    leaving = asyncio.ensure_future(receive())
    while not leaving.done():
        await ticker.next()
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})


async def _events() -> AsyncIterator[bytes]:
    while True:
        await ticker.next()
        yield EVENT


def framework() -> Any:
    """Return the same application in Starlette."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def stream(request: Request) -> Response:
        await request.json()
        return StreamingResponse(_events(), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok")

    chat = Route("/v1/chat/completions", stream, methods=["POST"])
    return Starlette(routes=[chat, Route("/health", health)])
