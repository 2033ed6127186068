"""An HTTP client for interactive commands: a whole answer, or its events as they come.

Measurements use :mod:`~trioserve.load.client`, which costs less and records the time of each event.
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
"""Seconds to connect, and to receive a whole answer. Events have no time limit."""
_READ_SIZE = 65536
_MAX_BYTES = 4 << 20
_MAX_SHOWN = 500
"""Most characters of an error that are shown."""


class RemoteError(TrioserveError):
    """The server can't be reached, or its answer is invalid. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RefusedRequest(RemoteError):
    """The server answered with an error; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@attrs.frozen(kw_only=True)
class HttpAnswer:
    """A whole answer. Names of ``headers`` are in lower case. The body is cut at 4 MiB."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def refusal(self) -> str:
        """Error text of the answer in one line; empty if it has none."""
        text = self.body.decode("utf-8", "replace")
        with contextlib.suppress(*DECODING_ERRORS):
            text = error_text(msgspec.json.decode(self.body, type=_ErrorBody).error)
        line = " ".join(text.split())
        return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + "..."


class _ErrorBody(msgspec.Struct):
    error: Any


@attrs.frozen(kw_only=True)
class Remote:
    """The address of a server and the headers of all requests.

    Each request has its own connection.
    """

    connect: Connect
    host: str
    """Value of the Host header."""
    url: str
    """URL shown to users."""
    headers: Mapping[str, str] = attrs.field(factory=dict)

    async def get(self, path: str) -> HttpAnswer:
        """Return the answer to ``GET path``, whatever its status.

        Raises:
            RemoteError: There is no valid answer.
        """
        with _remote_errors(self.url):
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
            RemoteError: There is no valid answer.
            RefusedRequest: The status isn't 200.
        """
        with _remote_errors(self.url):
            with trio.fail_after(_TIMEOUT):
                stream = await self.connect()
        async with contextlib.aclosing(stream):
            with _remote_errors(self.url):
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
        """Raise an error unless the status of ``answer`` is 200.

        Raises:
            RefusedRequest: The status isn't 200.
        """
        if answer.status == 200:
            return
        message = f"{self.url} refuses with {answer.status}"
        if answer.status in (401, 403):
            message += ": give the right --api-key"
        elif answer.refusal:
            message += f": {answer.refusal}"
        raise RefusedRequest(message, answer.status)

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@attrs.define(eq=False)
class RemoteEvents:
    """The events of an answer, in order. One task reads them."""

    _url: str
    _stream: trio.abc.Stream
    _response: ResponseReader
    _unread: bytes
    """Bytes of the body that came with the head."""
    _reader: EventReader = attrs.field(factory=EventReader)
    _ready: deque[Event] = attrs.field(factory=deque)

    def __aiter__(self) -> RemoteEvents:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            RemoteError: The connection was lost before the end of the answer.
        """
        await trio.lowlevel.checkpoint()
        while not self._ready:
            body, self._unread = self._unread, b""
            with _remote_errors(self._url):
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
    """Return the next bytes of the body; empty after the head and at the end."""
    data = bytes(await stream.receive_some(_READ_SIZE))
    try:
        return response.feed(data)
    except InvalidAnswer as error:
        if data:
            raise
        raise RemoteError(f"{url}: {error}") from error


@contextlib.contextmanager
def _remote_errors(url: str) -> Iterator[None]:
    """Turn an error of the connection in the block into a :exc:`RemoteError`."""
    try:
        yield
    except trio.TooSlowError as error:
        raise RemoteError(f"{url} doesn't answer within {_TIMEOUT:g} s") from error
    except (OSError, trio.BrokenResourceError) as error:
        raise RemoteError(f"{url} can't be reached: {reason_of(error)}") from error
    except InvalidAnswer as error:
        raise RemoteError(f"{url} gives no valid HTTP answer: {error}") from error
