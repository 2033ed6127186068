"""A shorter way for the pieces of a streamed body than ASGI's messages.

Each piece would pass through a message, an event, h11 or a queue, and as many coroutines, in a task
that has to be woken for it. Where the protocol's state says that a piece can go out as it is, all
of that is one framed write that waits for nothing, from whatever task. In every other state, and
to a reader that is slow, the piece goes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from hypercorn.protocol.events import Body
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import ASGISendCallable, ASGISendEvent, HTTPResponseBodyEvent
from hypercorn.utils import suppress_body

WriteNow = Callable[[bytes], bool]
"""Sends a piece of a body, of which more follow. False if nothing was sent, and ASGI's message is
to be sent instead."""


class ByteOutput(Protocol):
    """Where a protocol's bytes go."""

    @property
    def ready(self) -> bool:
        """Whether nothing is in the way of more bytes."""

    def send_now(self, data: bytes) -> bool:
        """Send ``data`` if this is :attr:`ready`, else do nothing and return False.

        What doesn't leave at once leaves by itself.
        """

    async def send(self, data: bytes | memoryview) -> None:
        """Send ``data`` after what others are sending; returns when it has left."""

    def note_turn(self, stream_id: int, *, is_servers: bool) -> None:
        """Note whether the server has to go on with a request, or its client has to.

        It is the client's turn while a request isn't whole, and while an answer isn't read.
        """


def body_message(data: bytes, *, more: bool = True) -> HTTPResponseBodyEvent:
    """ASGI's message for a piece of a response's body."""
    return {"type": "http.response.body", "body": data, "more_body": more}


class FastPathStream(HTTPStream):
    """One request and its response, on either protocol.

    ``write_piece`` is the protocol's: it is given the stream's id and a piece of the body that
    isn't empty, and says whether it could be sent.
    """

    def __init__(self, *arguments: Any, write_piece: Callable[[int, bytes], bool]) -> None:
        super().__init__(*arguments)
        self._write_piece = write_piece

    async def app_send(self, message: ASGISendEvent | None) -> None:
        """Pass a message on; a body of shared bytes stays a view of them."""
        if message is not None and message["type"] == "http.response.body":
            body = cast(Any, message).get("body")
            if isinstance(body, memoryview) and self.state is ASGIHTTPState.RESPONSE:
                if not suppress_body(self.scope["method"], int(self.response["status"])):
                    await self.send(Body(stream_id=self.stream_id, data=cast(bytes, body)))
                message = body_message(b"", more=message["more_body"])
        await super().app_send(message)

    def write_now(self, data: bytes) -> bool:
        """See :data:`WriteNow`."""
        if self.closed or self.state is not ASGIHTTPState.RESPONSE or not data:
            return False
        return self._write_piece(self.stream_id, data)


def takes_views(send: ASGISendCallable) -> bool:
    """Return whether the body of a message may be a view of bytes, which ASGI doesn't say."""
    return isinstance(getattr(send, "__self__", None), FastPathStream)


def writer_for(send: ASGISendCallable) -> WriteNow | None:
    """How pieces of a body may be sent at once where messages go to ``send``.

    The short way is there only where ``send`` is our own server's: whoever wraps it, as middleware
    does, wants to see the messages. With TLS each piece has to wait its turn, and what is refused
    here was encoded in vain.
    """
    stream = getattr(send, "__self__", None)
    if not isinstance(stream, FastPathStream) or send != stream.app_send:
        return None
    return None if stream.scheme == "https" else stream.write_now
