"""A client that calls the application without a socket, on any clock, streams included."""

from __future__ import annotations

import json
from typing import Any

import attrs
import trio

from trioserve.http.api.app import App

__all__ = ["Answer", "ask"]


@attrs.define
class Answer:
    """An answer. ``body`` grows while it comes."""

    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def error(self) -> Any:
        """The error that is the whole answer."""
        return json.loads(self.body)["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, decoded; comments are left out."""
        parts = self.body.decode().split("\n\n")[:-1]
        data = [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


async def ask(
    app: App,
    path: str,
    body: Any,
    *,
    headers: dict[str, str] | None = None,
    answer: Answer | None = None,
    reads_after: float = 0.0,
) -> Answer:
    """POST ``body`` as JSON, and read the answer to its end.

    Args:
        answer: where the answer is put while it comes (default: a new one).
        reads_after: seconds that each piece of the answer waits to be taken.
    """
    got = answer or Answer()
    encoded = json.dumps(body).encode()
    pieces = [{"type": "http.request", "body": encoded, "more_body": False}]

    async def receive() -> Any:
        if pieces:
            return pieces.pop()
        await trio.sleep_forever()

    async def send(message: Any) -> None:
        await trio.sleep(reads_after)
        if message["type"] == "http.response.start":
            got.status = message["status"]
            got.headers = {
                name.decode().lower(): value.decode() for name, value in message["headers"]
            }
        else:
            got.body += message["body"]
            got.complete = not message.get("more_body")

    given = {"Content-Type": "application/json", **(headers or {})}
    scope: Any = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": {},
    }
    await app(scope, receive, send)
    return got
