"""A server over HTTP, for single requests: an answer, or its events as they come.

This is for interactive commands. The loops of a measurement have a client of their own, which costs
less and records the time of each event.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import attrs
import msgspec
import trio

from trioserve.load.answer import DECODING_ERRORS, error_text
from trioserve.load.connect import Connect, reason_of
from trioserve.load.events import Event, EventReader
from trioserve.load.response import InvalidAnswer, ResponseReader
from trioserve.protocol.errors import TrioserveError, printable

_TIMEOUT = 30.0
"""Seconds for a connection and for a whole answer; events have no limit."""
_READ_SIZE = 65536
_MAX_BYTES = 4 << 20
_MAX_TOLD = 500
"""Characters of a refusal that are shown."""


class RemoteError(TrioserveError):
    """The server can't be reached, or its answer isn't understood. One line, for a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RefusedRequest(RemoteError):
    """The server answered with an error; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@attrs.frozen(kw_only=True)
class HttpAnswer:
    """A whole answer; the names of ``headers`` are in lower case. A body is cut at 4 MiB."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def refusal(self) -> str:
        """Error text of an answer in one line; empty if it has none."""
        text = self.body.decode("utf-8", "replace")
        with contextlib.suppress(*DECODING_ERRORS):
            text = error_text(msgspec.json.decode(self.body, type=_ErrorBody).error)
        line = " ".join(text.split())
        return line if len(line) <= _MAX_TOLD else line[:_MAX_TOLD] + "..."


class _ErrorBody(msgspec.Struct):
    error: Any


@attrs.frozen(kw_only=True)
class Remote:
    """The address of a server and the headers of all requests. Each request has its own
    connection.
    """

    connect: Connect
    host: str
    """Value of the Host header."""
    url: str
    """URL to show to users."""
    headers: Mapping[str, str] = attrs.field(factory=dict)

    async def get(self, path: str) -> HttpAnswer:
        """Return the answer to ``GET path``, whatever its status.

        Raises:
            RemoteError: there is no answer.
        """
        with _told(self.url):
            with trio.fail_after(_TIMEOUT):
                stream = await self.connect()
                async with contextlib.aclosing(stream):
                    await stream.send_all(self._request("GET", path))
                    return await _read_answer(stream, ResponseReader(), b"", self.url)

    @contextlib.asynccontextmanager
    async def events(self, path: str, body: Any = None) -> AsyncIterator[RemoteEvents]:
        """Yield the events of ``GET path``, or of ``POST path`` with ``body`` as JSON.

        Leaving the block closes the connection, which stops the answer.

        Raises:
            RemoteError: there is no answer; :class:`RefusedRequest` if its status isn't 200.
        """
        with _told(self.url):
            with trio.fail_after(_TIMEOUT):
                stream = await self.connect()
        async with contextlib.aclosing(stream):
            with _told(self.url):
                content = None if body is None else msgspec.json.encode(body)
                await stream.send_all(
                    self._request("GET" if body is None else "POST", path, content)
                )
                response, first = ResponseReader(), b""
                while not response.status:
                    first = await _receive(stream, response, self.url)
                if response.status != 200:
                    self.check(await _read_answer(stream, response, first, self.url))
            yield RemoteEvents(self.url, stream, response, first)

    def check(self, answer: HttpAnswer) -> None:
        """Refuse an answer with a status other than 200.

        Raises:
            Refusal: the status isn't 200.
        """
        if answer.status == 200:
            return
        told = f"{self.url} refuses with {answer.status}"
        if answer.status in (401, 403):
            told += ": give the right --api-key"
        elif answer.refusal:
            told += f": {answer.refusal}"
        raise RefusedRequest(told, answer.status)

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@attrs.define(eq=False)
class RemoteEvents:
    """The events of an answer, in their order. One task reads them."""

    _url: str
    _stream: trio.abc.Stream
    _response: ResponseReader
    _unread: bytes
    """Bytes of the body that came with its head."""
    _reader: EventReader = attrs.field(factory=EventReader)
    _ready: deque[Event] = attrs.field(factory=deque)

    def __aiter__(self) -> RemoteEvents:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            RemoteError: the connection was lost before the answer's end.
        """
        await trio.lowlevel.checkpoint()
        while not self._ready:
            body, self._unread = self._unread, b""
            with _told(self._url):
                if not body:
                    if self._response.ended:
                        raise StopAsyncIteration
                    body = await _receive(self._stream, self._response, self._url)
                self._ready.extend(self._reader.feed(body))
        return self._ready.popleft()


async def _read_answer(
    stream: trio.abc.Stream, response: ResponseReader, body: bytes, url: str
) -> HttpAnswer:
    with trio.fail_after(_TIMEOUT):
        while not response.ended and len(body) < _MAX_BYTES:
            body += await _receive(stream, response, url)
    return HttpAnswer(status=response.status, headers=response.headers, body=body)


async def _receive(stream: trio.abc.Stream, response: ResponseReader, url: str) -> bytes:
    """Return the next bytes of the body; none after the head or at the end."""
    data = bytes(await stream.receive_some(_READ_SIZE))
    try:
        return response.feed(data)
    except InvalidAnswer as error:
        if data:
            raise
        raise RemoteError(f"{url}: {error}") from error


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn an error in the block into one line for a terminal."""
    try:
        yield
    except trio.TooSlowError as error:
        raise RemoteError(f"{url} doesn't answer within {_TIMEOUT:g} s") from error
    except (OSError, trio.BrokenResourceError) as error:
        raise RemoteError(f"{url} can't be reached: {reason_of(error)}") from error
    except InvalidAnswer as error:
        raise RemoteError(f"{url} gives no valid HTTP answer: {error}") from error
