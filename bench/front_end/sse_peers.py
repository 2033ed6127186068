"""The peers' application: the same events at the same pace, the bytes of each made beforehand.

Run with uvicorn in the peers' environment, which has nothing of the project's. It is an ASGI
application without a framework. It is woken for a token in the cheapest way there is, and encodes
nothing.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

_CHUNK = {
    "id": "0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "fake",
    "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}],
}
INTERVAL = 0.02
"""Seconds from a token to the next one, here and in :mod:`.sse_server`."""
EVENT = b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n"


class Ticker:
    """Wakes all streams for each token."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._begun = False

    def next(self) -> asyncio.Future[None]:
        """Return a future that ends with the next token."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            self._begun = True
            self._tick(loop, loop.time())
        self._waiting.append(loop.create_future())
        return self._waiting[-1]

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        due = max(due + INTERVAL, loop.time())
        loop.call_at(due, self._tick, loop, due)


ticker = Ticker()


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
