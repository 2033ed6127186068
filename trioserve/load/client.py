"""An HTTP/1.1 client that records the time of each event."""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs
import msgspec
import trio

from trioserve.load.connect import Connect, reason_of
from trioserve.load.exchange import Exchange
from trioserve.load.records import Record
from trioserve.load.socket_reader import READ_SIZE, SocketReader
from trioserve.load.target import Sender
from trioserve.load.work import Cancel


@attrs.frozen(kw_only=True)
class Target:
    """A server's completions endpoint, and the common fields of all requests.

    ``path`` is ``/v1/completions`` or ``/v1/chat/completions``. Every body has the ``fields``.
    ``timeout`` is for one request, in seconds.
    """

    connect: Connect
    path: str
    fields: Mapping[str, Any]
    headers: Mapping[str, str] = attrs.field(factory=dict)
    timeout: float = 600.0
    host: str = "localhost"
    _head: bytes = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        headers = {
            "Host": self.host,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            **self.headers,
        }
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        for line in lines:
            if not line.isprintable():
                raise ValueError(f"not a header of one line: {line!r}")
        object.__setattr__(self, "_head", "\r\n".join(lines).encode() + b"\r\nContent-Length: ")

    @property
    def chat(self) -> bool:
        """True if the endpoint takes messages, False if it takes a prompt."""
        return self.path.endswith("/chat/completions")

    def request(self, fields: Mapping[str, Any]) -> bytes:
        """Return the bytes of a request whose body has ``fields``."""
        body = msgspec.json.encode({**self.fields, **fields, "stream": True})
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    @contextlib.asynccontextmanager
    async def senders(self) -> AsyncIterator[Sender]:
        """Yield a sender of requests. Leaving the block closes its connections."""
        socket_reader = SocketReader()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(socket_reader.run)
            pool = _Pool(self, socket_reader)
            try:
                yield pool
            finally:
                with trio.CancelScope(shield=True):
                    await pool.close()
            nursery.cancel_scope.cancel()


class Client:
    """One keep-alive connection, opened at the first request and after every failure.

    Leaving its ``async with`` closes the connection.
    """

    def __init__(self, target: Target, socket_reader: SocketReader | None = None) -> None:
        self._target = target
        self._socket_reader = socket_reader
        self._stream: trio.abc.Stream | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """True while the connection is open, as far as is known."""
        return self._stream is not None

    async def send(self, fields: Mapping[str, Any]) -> Record:
        """Send one request and read its stream to the end. Failures are in the record."""
        record = Record(started=trio.current_time())
        await self.ask(fields, record)
        return record

    async def ask(
        self, fields: Mapping[str, Any], record: Record, cancel: Cancel | None = None
    ) -> None:
        """Send a request as :meth:`trioserve.load.target.Sender.ask` describes, one at a time.

        The time starts here, so it includes connecting.
        """
        cancel = cancel or Cancel()
        exchange = Exchange(record, cancel.events)
        request = self._target.request(fields)
        record.started = trio.current_time()
        timeout = self._target.timeout
        leaves_after = math.inf if cancel.seconds is None else cancel.seconds
        try:
            with trio.move_on_after(min(leaves_after, timeout)) as scope:
                await self._exchange(request, exchange)
            if scope.cancelled_caught and leaves_after < timeout:
                record.leave()
            elif scope.cancelled_caught:
                record.fail("timeout", f"TooSlowError: not done within {timeout:g} s")
        except (OSError, trio.BrokenResourceError) as error:
            kind = "no connection" if self._stream is None else "connection lost"
            record.fail(kind, f"{type(error).__name__}: {reason_of(error)}")
        finally:
            exchange.close()
            record.ended = trio.current_time()
            if not exchange.reusable:
                await self.close()

    async def _exchange(self, request: bytes, exchange: Exchange) -> None:
        """Send on the present connection, and again on a new one if it has ended.

        Some servers close a connection after an answer without announcing it (llama.cpp's after a
        stream), or while it is idle. Then the server hasn't begun the request.
        """
        if self._stream is not None and not _has_ended(self._stream):
            exchange.connection_was_used = True
            await self._ask_on(self._stream, request, exchange)
            if not exchange.unanswered:
                return
        resent = exchange.unanswered
        await self.close()
        exchange.connection_was_used = exchange.unanswered = False
        self._stream = await self._target.connect()
        exchange.record.resent = resent
        await self._ask_on(self._stream, request, exchange)

    async def _ask_on(self, stream: trio.abc.Stream, request: bytes, exchange: Exchange) -> None:
        try:
            await self._read_answer(stream, request, exchange)
        except (OSError, trio.BrokenResourceError):
            # The server closed the connection while the request was being sent.
            if not exchange.note_connection_end():
                raise

    async def _read_answer(
        self, stream: trio.abc.Stream, request: bytes, exchange: Exchange
    ) -> None:
        await stream.send_all(request)
        if self._socket_reader is not None and isinstance(stream, trio.SocketStream):
            await self._socket_reader.read(stream.socket.fileno(), exchange)
            return
        while not exchange.receive(
            bytes(await stream.receive_some(READ_SIZE)), trio.current_time()
        ):
            pass

    async def close(self) -> None:
        """Close the connection at once, if there is one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with trio.CancelScope(shield=True):  # A forceful close doesn't block.
                await trio.aclose_forcefully(stream)


def _has_ended(stream: trio.abc.Stream) -> bool:
    """Return True if the server has closed an idle connection, or sent unexpected bytes."""
    inner = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    if not isinstance(inner, trio.SocketStream):
        return False
    poll = select.poll()
    poll.register(inner.socket.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class _Pool:
    """A pool of clients that reuses free connections."""

    def __init__(self, target: Target, socket_reader: SocketReader) -> None:
        self._target = target
        self._socket_reader = socket_reader
        self._free: list[Client] = []

    async def ask(
        self, fields: Mapping[str, Any], record: Record, cancel: Cancel | None = None
    ) -> None:
        client = self._free.pop() if self._free else Client(self._target, self._socket_reader)
        await client.ask(fields, record, cancel)
        if client.connected:
            self._free.append(client)

    async def close(self) -> None:
        while self._free:
            await self._free.pop().close()


async def send(target: Target, fields: Mapping[str, Any]) -> Record:
    """Send one request on a new connection."""
    async with Client(target) as client:
        return await client.send(fields)
