"""HTTP/1.1 on one connection: hypercorn's protocol with stricter checks.

A head that two servers could read differently allows requests to be smuggled past a proxy. Such a
head is refused: a length beside chunks, folded lines, lines without a carriage return, chunks in
HTTP/1.0. A connection is never upgraded, because no websockets are served and ``h2c`` would bypass
a proxy's rules. A request for an upgrade is answered as if it hadn't asked.
"""

from __future__ import annotations

import re
from typing import Any

import h11
import msgspec
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.events import Body, EndBody, Request
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol
from hypercorn.typing import H11SendableEvent

from trioserve.http.server.error_body import ErrorDetail, ErrorResponse
from trioserve.http.server.fast_path import ByteOutput, FastPathStream
from trioserve.http.server.settings import ServerSettings
from trioserve.observability.logs import get_logger

MAX_HEADERS = 256

_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_AMBIGUOUS_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_AUTHORITY = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_MESSAGES = {
    400: ("bad_request", "this can't be read as an HTTP request"),
    408: ("request_timeout", "the request's head didn't come in time"),
    431: ("head_too_large", "the request's head is larger than this server takes"),
    501: ("not_implemented", "this server doesn't know the request's Transfer-Encoding"),
    505: ("http_version_not_supported", "this server speaks HTTP/1.0, 1.1 and 2"),
}

_log = get_logger("trioserve.http")


class HeadBegun(Event):
    """Event: the first bytes of a request have come, the rest of its head hasn't."""


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def path_of(target: bytes) -> bytes | None:
    """Return path and query of a request's target, which may include a host; None if it has no
    path.
    """
    if not target.startswith(b"/"):
        authority = _AUTHORITY.match(target)
        if authority is None:
            return None
        rest = target[authority.end() :]
        target = rest if rest.startswith(b"/") else b"/" + rest
    return target if target.isascii() else None


class HTTP1(H11Protocol):
    """HTTP/1.1 protocol of one client, which serves its requests one after the other."""

    config: ServerSettings
    connection: h11.Connection

    _head_begun = False
    _is_head_request = False
    _may_continue = True
    """False if a client that waits for permission isn't told to send the body."""
    _in_chunks = False
    """True while a response with a chunked body is being sent."""

    def __init__(self, *arguments: Any, output: ByteOutput) -> None:
        super().__init__(*arguments)
        self._output = output

    async def end(self, *, timed_out: bool) -> None:
        """Stop reading; no request is being served."""
        if timed_out and self._head_begun:
            await self._send_error_response(408)

    async def _handle_events(self) -> None:
        try:
            while await self._handle_next():
                pass
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
        except _Refused as error:
            await self._refuse(error.status)

    async def _handle_next(self) -> bool:
        """Handle one event of what has been received; return False if there is none yet."""
        if self.connection.their_state is h11.IDLE:
            self._check_head(self.connection.trailing_data[0])
        elif self.connection.they_are_waiting_for_100_continue and self._may_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))
        event = self.connection.next_event()
        if isinstance(event, h11.Request):
            self._head_begun = False
            self._is_head_request = event.method == b"HEAD"
            self._check_request(event)
            await self.send(Updated(idle=False))
            await self._create_stream(event)
        elif isinstance(event, h11.EndOfMessage) and self.stream is not None:
            self._output.note_turn(STREAM_ID, is_servers=True)
            await self.stream.handle(EndBody(stream_id=STREAM_ID))
        elif event is h11.PAUSED:
            # One request at a time: the next is read after this one has been answered.
            await self.can_read.clear()
            await self.can_read.wait()
        elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
            await self._note_head_begun()
            return False
        elif self.stream is None:
            return False  # The request was answered already; the rest of its body is dropped.
        elif isinstance(event, h11.Data):
            await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
        return True

    def _check_head(self, data: bytes) -> None:
        """Refuse a complete head that h11 would accept and other servers may read differently."""
        end = _END_OF_HEAD.search(data)
        if end is None:
            return
        head = data[: end.end()]
        if _AMBIGUOUS_LINE.search(head):
            raise _Refused(400)
        if len(head) > self.config.h11_max_incomplete_size or head.count(b"\n") > MAX_HEADERS + 2:
            raise _Refused(431)

    def _check_request(self, request: h11.Request) -> None:
        if (request.method, request.target, request.http_version) == (b"PRI", b"*", b"2.0"):
            raise H2ProtocolAssumedError(_PREFACE + self.connection.trailing_data[0])
        if request.http_version not in (b"1.0", b"1.1"):
            raise _Refused(505)
        headers = dict(request.headers)
        if b"transfer-encoding" in headers and (
            b"content-length" in headers or request.http_version == b"1.0"
        ):
            raise _Refused(400)
        length = int(headers.get(b"content-length", b"0"))
        self._may_continue = length <= self.config.max_body_size

    async def _note_head_begun(self) -> None:
        begun = self.connection.their_state is h11.IDLE and bool(self.connection.trailing_data[0])
        if begun and not self._head_begun:
            self._head_begun = True
            self._is_head_request = False
            await self.send(HeadBegun())

    async def _create_stream(self, request: h11.Request) -> None:
        path = path_of(request.target)
        if path is None:
            raise _Refused(400)
        self.stream = FastPathStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
            write_piece=self._write_piece,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=path,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if isinstance(event, h11.EndOfMessage):
            self._in_chunks = False
        try:
            pieces = self.connection.send_with_data_passthrough(event) or []
        except h11.LocalProtocolError:
            self._in_chunks = False
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response):
            self._in_chunks = not self._is_head_request and _CHUNKED in b"".join(pieces).lower()
        await self._output.send(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _write_piece(self, _: int, data: bytes) -> bool:
        """Send a piece of the body as a chunk, framed as h11 would."""
        return self._in_chunks and self._output.send_now(b"%x\r\n%b\r\n" % (len(data), data))

    async def _refuse(self, status: int) -> None:
        """Answer, unless an answer has begun, and end the connection."""
        _log.info("a request can't be read", status=status, client=self._client_address())
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._send_error_response(status)
        await self.send(Closed())

    def _client_address(self) -> str | None:
        return self.client[0] if self.client else None

    async def _send_error_response(self, status_code: int) -> None:
        code, message = _MESSAGES.get(status_code, _MESSAGES[400])
        detail = ErrorDetail(message=message, type="invalid_request_error", code=code)
        body = msgspec.json.encode(ErrorResponse(detail))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if not self._is_head_request:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
