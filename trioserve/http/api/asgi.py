"""ASGI side of one HTTP request: opened before its 200, logged once, and always answered.

It differs from quart-trio's connection in three ways. First, a streaming body is *entered* before
the response begins, so an error before admission becomes a response with its own status. Second, a
later error becomes the last event of the stream, sent after the scope of the generations was left.
Third, every request leaves one line in the log, with 499 if the client went away.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, cast

import trio
from hypercorn.typing import (
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
    WebsocketScope,
)
from quart.utils import encode_headers
from quart.wrappers.response import Response
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection, TrioASGIWebsocketConnection
from quart_trio.wrappers import TrioRequest

from trioserve.engine.request_engine import RequestEngine
from trioserve.http.api.access_log import AccessRecord, request_id_from
from trioserve.http.api.bodies import Body, BodyBudget
from trioserve.http.api.cors import CrossOrigin
from trioserve.http.api.dialects import error_body, id_headers
from trioserve.http.api.errors import ErrorReply, describe_error
from trioserve.http.api.sse import EventBody
from trioserve.http.server.connection import CONNECTION_STATE
from trioserve.http.server.fast_path import WriteNow, body_message, takes_views, writer_for
from trioserve.http.server.holdings import address_of
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import InvalidRequest

_log = get_logger("trioserve.http")


class LoggedRequest(TrioRequest):
    """Request that carries its record for the access log.

    Callbacks pushed on ``at_end`` run when the request ends, for any reason.
    """

    body_class = Body
    body: Body
    record: AccessRecord
    at_end: contextlib.ExitStack


def error_response(error: BaseException, path: str) -> tuple[Response, ErrorReply]:
    """Return the response for an error raised before anything was sent; log an unexpected error.

    Args:
        path: the requested path, which decides the form of the error.
    """
    reply = describe_error(error, error_body(path))
    if reply.reason == "internal_error":
        _log.error("a request failed", exc_info=error)
    response = Response(
        reply.body, status=reply.status, headers=reply.headers, content_type="application/json"
    )
    return response, reply


class ConnectionApp(QuartTrio):
    """Quart application with the attributes that its connections use."""

    engine: RequestEngine
    cross_origin: CrossOrigin
    body_room: BodyBudget


class HTTPConnection(TrioASGIHTTPConnection):
    """ASGI connection of one request; quart creates one for each."""

    app: ConnectionApp
    record: AccessRecord
    at_end: contextlib.ExitStack
    _send: ASGISendCallable
    """Send function of the server, below the one that watches outgoing messages."""
    _write_now: WriteNow | None
    _events: EventBody | None = None
    """Stream that is being sent."""
    _receiving: trio.CancelScope | None = None

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serve the request; return when the response is complete or the client has left."""
        self._send = send
        self._write_now = writer_for(send)
        self.record = _open_record(self.scope, self.scope["method"])
        origin = _header(self.scope, b"origin") or None
        cross_origin = self.app.cross_origin.response_headers(origin)

        views = takes_views(send)

        async def noting_send(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                self.record.status = message["status"]
                message["headers"] = [*message["headers"], *cross_origin, *self._last_words()]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                # Before it is sent: hypercorn reports the end as a disconnect, even to us.
                self.record.completed = True
            await send(message if views else _of_bytes(message))
            if message["type"] == "http.response.body" and message.get("body"):
                self.record.note_sent()

        try:
            with contextlib.ExitStack() as self.at_end:
                await super().__call__(receive, noting_send)
        finally:
            self._note_stall()
            self.record.write(self.app.engine.metrics)

    def _create_request_from_scope(self, send: ASGISendCallable) -> LoggedRequest:
        request = cast(LoggedRequest, super()._create_request_from_scope(send))
        request.record = self.record
        request.at_end = self.at_end
        request.body.room = self.app.body_room
        request.body.address = address_of(self.scope.get("client"))
        self.at_end.callback(request.body.release)
        return request

    # In a program that handles no signals, a Ctrl-C belongs to its main task, not to the task that
    # runs.
    @trio.lowlevel.enable_ki_protection
    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: LoggedRequest, send: ASGISendCallable
    ) -> None:
        """Answer the request."""
        await super().handle_request(nursery, request, send)

    @trio.lowlevel.enable_ki_protection
    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: LoggedRequest, receive: ASGIReceiveCallable
    ) -> None:
        """Feed the body; return, and cancel the handler, when the client disconnects."""

        more_body = True

        async def receive_and_break_silence() -> ASGIReceiveEvent:
            nonlocal more_body
            if more_body:
                message = await receive()
                more_body = message["type"] == "http.request" and message.get("more_body", False)
                return message
            while True:
                deadline = math.inf if self._events is None else self._events.look_again_at
                with trio.CancelScope(deadline=deadline) as self._receiving:
                    return await receive()
                await self._break_silence()

        await super(TrioASGIHTTPConnection, self).handle_messages(
            request, receive_and_break_silence
        )
        self.record.disconnected = True
        nursery.cancel_scope.cancel()

    async def _break_silence(self) -> None:
        """Send a keep-alive, if a stream still waits for its next event.

        The task that waits for the client's disconnect does this: a deadline around each wait for
        an event would cost as much as the rest of the wait.
        """
        events = self._events
        if events is None or not events.note_if_silent():
            return
        await self._send_piece(events.framing.keep_alive)

    def _last_words(self) -> list[tuple[bytes, bytes]]:
        """Return the header that tells an HTTP/1 client of a draining server to close the
        connection.
        """
        closing = self.app.engine.draining and self.scope["http_version"].startswith("1")
        return [(b"connection", b"close")] if closing else []

    def _note_stall(self) -> None:
        """Record a stall, which our own server marks in the connection's state."""
        state: dict[str, Any] = cast("dict[str, Any]", self.scope).get("state") or {}
        connection = state.get(CONNECTION_STATE)
        if not self.record.completed and getattr(connection, "stalled", False):
            self.record.note_error("slow_reader")

    async def _send_response(self, send: ASGISendCallable, response: Any) -> None:
        self._tell_id(response)
        body = getattr(response, "response", None)
        if isinstance(body, EventBody):
            await self._send_stream(send, response, body)
        else:
            await super()._send_response(send, response)

    async def _send_stream(
        self, send: ASGISendCallable, response: Response, body: EventBody
    ) -> None:
        begun = False
        body.write_now = self._write_now
        try:
            async with body as events:
                begun = True
                await send(_start(response))
                self._events = events
                if self._receiving is not None:
                    self._receiving.deadline = events.look_again_at
                async for data in events:
                    await self._send_piece(data)
        except Exception as error:
            self._events = None
            refusal, reply = error_response(error, self.record.path)
            self.record.note_error(reply.reason)
            if not begun:
                self._tell_id(refusal)
                await super()._send_response(send, refusal)
                return
            await send(body_message(body.framing.error(reply.body)))
        self._events = None
        await send(body_message(b"", more=False))

    def _tell_id(self, response: Response) -> None:
        for name in id_headers(self.record.path):
            response.headers[name] = self.record.request_id

    async def _send_piece(self, data: bytes) -> None:
        if self._write_now is None or not self._write_now(data):
            await self._send(body_message(data))


class WebSocketConnection(TrioASGIWebsocketConnection):
    """Connection that refuses a websocket with a response; no websockets are served."""

    app: ConnectionApp

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer the handshake with an error and leave a line in the log."""
        record = _open_record(self.scope, "GET")
        response, reply = error_response(
            InvalidRequest("nothing here is served over a websocket"), record.path
        )
        record.status = response.status_code
        record.completed = True
        record.note_error(reply.reason)
        response.headers["X-Request-Id"] = record.request_id
        try:
            messages: list[Any] = [_start(response), body_message(reply.body, more=False)]
            for message in messages:
                await send({**message, "type": "websocket." + message["type"]})
        finally:
            record.write(self.app.engine.metrics)


def without_prefix(scope: Scope, prefix: str) -> Scope:
    """Return ``scope`` without ``prefix`` at the beginning of its path; a proxy may have left it
    there.

    ``prefix`` doesn't end in a slash. Another path stays as it is.
    """
    if not prefix or scope["type"] == "lifespan":
        return scope
    path = scope["path"]
    if path != prefix and not path.startswith(f"{prefix}/"):
        return scope
    return cast("Scope", {**scope, "path": path[len(prefix) :] or "/"})


def _open_record(scope: HTTPScope | WebsocketScope, method: str) -> AccessRecord:
    client = scope.get("client")
    return AccessRecord(
        method=method,
        path=scope["path"],
        request_id=request_id_from(_header(scope, b"x-request-id")),
        client=client[0] if client else None,
        traceparent=_header(scope, b"traceparent"),
        tracestate=_header(scope, b"tracestate"),
    )


def _of_bytes(message: ASGISendEvent) -> ASGISendEvent:
    """Return ``message`` with a copy of its body, if that is a view."""
    body = cast(Any, message).get("body")
    return cast(Any, {**message, "body": bytes(body)}) if isinstance(body, memoryview) else message


def _header(scope: HTTPScope | WebsocketScope, name: bytes) -> str:
    """Return a header's value, several joined by commas; empty if there is none."""
    return b",".join(value for key, value in scope["headers"] if key == name).decode("latin-1")


def _start(response: Response) -> Any:
    return {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": encode_headers(response.headers),
    }
