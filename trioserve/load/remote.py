"""A server over HTTP that is asked for one thing at a time: an answer, or its events as they come.

For what people look at. The loops of a measurement have a client of their own, which costs less and
notes when each piece came.
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
"""Seconds for a connection and for a whole answer; events may take any time."""
_READ_SIZE = 65536
_MAX_BYTES = 4 << 20
_MAX_TOLD = 500
"""Characters of a refusal that are passed on."""


class RemoteError(TrioserveError):
    """The server can't be reached, or what it says isn't understood. One line, for a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Refusal(RemoteError):
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
        """What an answer that is none says for itself, in one line; empty where it says nothing."""
        text = self.body.decode("utf-8", "replace")
        with contextlib.suppress(*DECODING_ERRORS):
            text = error_text(msgspec.json.decode(self.body, type=_ErrorBody).error)
        line = " ".join(text.split())
        return line if len(line) <= _MAX_TOLD else line[:_MAX_TOLD] + "..."


class _ErrorBody(msgspec.Struct):
    error: Any


@attrs.frozen(kw_only=True)
class Remote:
    """Where the server is and what every request to it says. Each request has its connection."""

    connect: Connect
    host: str
    """What the Host header says."""
    url: str
    """What people are told."""
    headers: Mapping[str, str] = attrs.field(factory=dict)

    async def get(self, path: str) -> HttpAnswer:
        """The answer to ``GET path``, whatever its status.

        Raises:
            RemoteError: it can't be had.
        """
        with _told(self.url):
            with trio.fail_after(_TIMEOUT):
                stream = await self.connect()
                async with contextlib.aclosing(stream):
                    await stream.send_all(self._request("GET", path))
                    return await _read_answer(stream, ResponseReader(), b"", self.url)

    @contextlib.asynccontextmanager
    async def events(self, path: str, body: Any = None) -> AsyncIterator[RemoteEvents]:
        """The events of ``GET path``, or of ``POST path`` where there is a ``body`` for its JSON.

        Leaving the block closes the connection, which is how such an answer is stopped.

        Raises:
            RemoteError: it can't be had; :class:`Refusal` where its status isn't 200.
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
        """Refuse an answer whose status isn't 200.

        Raises:
            Refusal: it isn't.
        """
        if answer.status == 200:
            return
        told = f"{self.url} refuses with {answer.status}"
        if answer.status in (401, 403):
            told += ": give the right --api-key"
        elif answer.refusal:
            told += f": {answer.refusal}"
        raise Refusal(told, answer.status)

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@attrs.define(eq=False)
class RemoteEvents:
    """The events of an answer, in the order in which they come. One task reads them."""

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
        """The next event.

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
    """What comes next of the body; nothing where it was the head, or the end."""
    data = bytes(await stream.receive_some(_READ_SIZE))
    try:
        return response.feed(data)
    except InvalidAnswer as error:
        if data:
            raise
        raise RemoteError(f"{url}: {error}") from error


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """What goes wrong inside, as one line for a person."""
    try:
        yield
    except trio.TooSlowError as error:
        raise RemoteError(f"{url} doesn't answer within {_TIMEOUT:g} s") from error
    except (OSError, trio.BrokenResourceError) as error:
        raise RemoteError(f"{url} can't be reached: {reason_of(error)}") from error
    except InvalidAnswer as error:
        raise RemoteError(f"{url} gives no valid HTTP answer: {error}") from error
