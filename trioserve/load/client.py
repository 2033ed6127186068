"""One streaming request: bytes out, events in, and the time at which each came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs
import h11
import msgspec
import trio

__all__ = ["Client", "Connect", "Record", "Target", "over_tcp", "send"]

Connect = Callable[[], Awaitable[trio.abc.Stream]]

_READ_SIZE = 65536


@attrs.frozen(kw_only=True)
class Target:
    """A server's completions endpoint and what every request to it says.

    ``path`` is ``/v1/completions`` or ``/v1/chat/completions``; ``fields`` are joined into every
    body. ``timeout`` is in seconds, for one request.
    """

    connect: Connect
    path: str
    fields: Mapping[str, Any]
    headers: Mapping[str, str] = attrs.field(factory=dict)
    timeout: float = 600.0


@attrs.define(kw_only=True)
class Record:
    """What became of one request. Times are seconds on trio's clock.

    ``chunks`` are the times of the events with a non-empty ``choices``, even if its text is empty;
    ``first_text`` is that of the first with some text. ``token_ids`` are those that the server
    told where it was asked to. The token counts are the server's own, None where it named none.
    ``error`` is empty on success.
    """

    started: float
    chunks: list[float] = attrs.field(factory=list)
    first_text: float | None = None
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""


def over_tcp(base_url: str) -> Connect:
    """Connections to ``http://host:port``.

    Raises:
        ValueError: ``base_url`` is no such address.
    """
    parts = urlsplit(base_url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"expected http://host:port, got {base_url!r}")
    host, port = parts.hostname, parts.port or 80

    async def connect() -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(host, port)
        stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        return stream

    return connect


class Client:
    """One keep-alive connection, opened when first needed and after every failure.

    Leaving its ``async with`` closes the connection.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stream: trio.abc.Stream | None = None
        self._http = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    async def send(self, fields: Mapping[str, Any]) -> Record:
        """Send one request and read its stream to the end; failures are in the record."""
        body = msgspec.json.encode({**self._target.fields, **fields, "stream": True})
        record = Record(started=trio.current_time())
        finished = False
        try:
            with trio.fail_after(self._target.timeout):
                await self._exchange(body, record)
            finished = True
        except (trio.TooSlowError, OSError, trio.BrokenResourceError) as error:
            record.error = f"{type(error).__name__}: {error}".rstrip(": ")
        except (h11.RemoteProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            record.error = f"not a valid answer: {error}"
        finally:
            if not finished:
                await self._close()
        return record

    async def _exchange(self, body: bytes, record: Record) -> None:
        if self._stream is None:
            self._stream = await self._target.connect()
            self._http = h11.Connection(h11.CLIENT)
        headers = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Content-Length": str(len(body)),
            **self._target.headers,
        }
        request = h11.Request(method="POST", target=self._target.path, headers=[*headers.items()])
        start = self._http.send(request)
        assert start is not None
        rest = self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage())
        await self._stream.send_all(start + b"".join(part or b"" for part in rest))
        await self._read(record)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            await self._close()

    async def _read(self, record: Record) -> None:
        """Read the response into ``record``."""
        events = _EventParser()
        refusal: bytearray | None = None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                assert self._stream is not None
                self._http.receive_data(bytes(await self._stream.receive_some(_READ_SIZE)))
            elif isinstance(event, h11.Response):
                if event.status_code != 200:
                    refusal = bytearray()
                    record.error = f"HTTP {event.status_code}"
            elif isinstance(event, h11.Data):
                if refusal is not None:
                    refusal += event.data
                else:
                    now = trio.current_time()
                    for data in events.feed(bytes(event.data)):
                        _note(record, data, now)
            elif isinstance(event, h11.EndOfMessage):
                break
        if refusal:
            record.error += ": " + refusal[:500].decode(errors="replace")
        elif not record.error and not record.chunks:
            record.error = "the stream held no tokens"

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with trio.CancelScope(shield=True):  # a forceful close doesn't block
                await trio.aclose_forcefully(stream)


async def send(target: Target, fields: Mapping[str, Any]) -> Record:
    """One request on a connection of its own."""
    async with Client(target) as client:
        return await client.send(fields)


class _EventParser:
    """Server-sent events out of bytes that are cut anywhere; only their data matters here."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of every line that is now complete; the format used here has one to an event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@attrs.frozen
class _Delta:
    content: str | None = None


@attrs.frozen
class _Choice:
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


@attrs.frozen
class _Usage:
    prompt_tokens: int
    completion_tokens: int


@attrs.frozen
class _Event:
    choices: list[_Choice] = attrs.field(factory=list)
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


def _note(record: Record, data: bytes, now: float) -> None:
    if data == b"[DONE]":
        return
    event = _DECODER.decode(data)
    if event.error is not None:
        error = event.error
        record.error = str(error.get("message", error) if isinstance(error, dict) else error)
    if event.usage is not None:
        record.prompt_tokens = event.usage.prompt_tokens
        record.completion_tokens = event.usage.completion_tokens
    if not event.choices:
        return
    choice = event.choices[0]
    text = choice.text or (choice.delta.content if choice.delta else None) or ""
    record.chunks.append(now)
    if text and record.first_text is None:
        record.first_text = now
    record.text += text
    record.token_ids += choice.token_ids or []
    record.finish_reason = choice.finish_reason or record.finish_reason
