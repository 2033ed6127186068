"""One request of a client: its head, its body, and the answer that is sent to it."""

from __future__ import annotations

from typing import Any, cast

import attrs
import msgspec
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from werkzeug.exceptions import RequestTimeout

from trioserve.http.api.bodies import Body, BodyBudget
from trioserve.http.api.dialects import error_body
from trioserve.http.api.errors import ErrorReply, describe_error
from trioserve.http.api.sse import raw_event, typed_event
from trioserve.http.server.error_body import ErrorResponse
from trioserve.http.server.fast_path import WriteNow, body_message, writer_for
from trioserve.http.server.holdings import address_of

Headers = list[tuple[bytes, bytes]]

_OF_ONE_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    }
)
"""Headers that aren't forwarded (RFC 9110, 7.6.1), and one that this server has answered."""


@attrs.define(eq=False)
class ClientRequest:
    """A request, and how far its answer is.

    Args:
        scope: Its head.
        room: The budget of all bodies.
        max_body_size: The most bytes that it may have.
    """

    scope: HTTPScope
    _receive: ASGIReceiveCallable
    _send: ASGISendCallable
    _room: BodyBudget
    _max_body_size: int
    body: bytes = attrs.field(init=False, default=b"")
    status: int = attrs.field(init=False, default=0)
    """Status of the answer once it has begun."""
    content_type: bytes = attrs.field(init=False, default=b"")
    completed: bool = attrs.field(init=False, default=False)
    """True once the whole answer has been sent."""
    _write_now: WriteNow | None = attrs.field(init=False)
    _incoming: Body = attrs.field(init=False)
    """Its body until it is complete, and afterwards the room that it takes."""

    def __attrs_post_init__(self) -> None:
        self._write_now = writer_for(self._send)
        self._incoming = Body(None, self._max_body_size)
        self._incoming.room = self._room
        self._incoming.address = address_of(self.scope.get("client"))

    @property
    def method(self) -> str:
        """Its method."""
        return self.scope["method"]

    @property
    def path(self) -> str:
        """Its path, decoded."""
        return self.scope["path"]

    @property
    def target(self) -> bytes:
        """Its path and query as they were sent."""
        raw, query = self.scope["raw_path"], self.scope["query_string"]
        return raw + b"?" + query if query else raw

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, empty if there is none."""
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    def forwarded_headers(self) -> Headers:
        """Return the headers for a server."""
        return end_to_end(self.scope["headers"])

    async def receive(self) -> None:
        """Take in the body, and block until the client has left or has got the whole answer."""
        while (message := cast(Any, await self._receive()))["type"] == "http.request":
            self._incoming.append(message.get("body", b""))
            if not message.get("more_body"):
                self._incoming.set_complete()

    async def read(self, timeout: float) -> None:
        """Block until :meth:`receive` has taken in the whole body.

        Raises:
            RequestEntityTooLarge: It has too many bytes.
            RequestTimeout: It didn't come within ``timeout`` seconds.
            QueueFull: There is no room for it, or another body needed its room.
        """
        with trio.move_on_after(timeout) as limit:
            self.body = await self._incoming
        if limit.cancelled_caught:
            raise RequestTimeout
        self._incoming.clear()

    def release(self) -> None:
        """Drop the body, which isn't needed any more. Idempotent."""
        self.body = b""
        self._incoming.release()

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""
        self.status = status
        self.content_type = dict(headers).get(b"content-type", b"")
        message: Any = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(message)

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the answer's body, the last one unless there is ``more``."""
        self.completed = not more
        if not more or self._write_now is None or not self._write_now(data):
            await self._send(body_message(data, more=more))

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send(b"" if self.method == "HEAD" else body, more=False)

    async def fail(self, error: Exception) -> ErrorReply:
        """End the answer with ``error``, in the form of the client's API.

        Raises:
            AnswerCut: The answer has begun, and isn't a stream that could hold an error.
        """
        reply = describe_error(error, error_body(self.path))
        if not self.status:
            headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
            headers.append((b"content-type", b"application/json"))
            await self.answer(reply.status, headers, reply.body)
            return reply
        event = self._error_event(reply.body)
        if event is None:
            raise AnswerCut(str(error))
        await self.send(event)
        await self.send(b"", more=False)
        return reply

    def _error_event(self, body: bytes) -> bytes | None:
        """Return the last event of a stream for an error; None if the answer is no stream."""
        if self.content_type.startswith(b"application/x-ndjson"):
            return body + b"\n"
        if not self.content_type.startswith(b"text/event-stream"):
            return None
        if self.path.startswith("/v1/responses"):
            return typed_event(_StreamError.of(body))
        if self.path.startswith("/v1/messages"):
            return b"event: error\n" + raw_event(body)
        return raw_event(body)


class _StreamError(msgspec.Struct, tag_field="type", tag="error"):
    """OpenAI's event of an error in a response's stream."""

    code: str | None
    message: str
    param: str | None = None
    sequence_number: int = 0

    @classmethod
    def of(cls, body: bytes) -> _StreamError:
        """Return the event of an error that has this body."""
        detail = msgspec.json.decode(body, type=ErrorResponse).error
        return cls(detail.code, detail.message, detail.param)


class AnswerCut(Exception):
    """The answer broke off where no error can be told; the connection has to be cut."""


def end_to_end(headers: Any) -> Headers:
    """Return the headers that aren't for one connection only."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    return [
        (key.lower(), value)
        for key, value in headers
        if key.lower() not in _OF_ONE_CONNECTION and key.lower() not in named
    ]
