"""Fast path for the pieces of a streamed body, past ASGI's messages.

The usual way of a piece is a message, an event, h11 or a queue, and as many coroutines, in a task
that has to be woken. If the protocol's state allows it, the fast path replaces all of that by one
framed write that doesn't wait, from any task. In every other state, and for a slow reader, the
piece takes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from hypercorn.protocol.events import Body
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import ASGISendCallable, ASGISendEvent, HTTPResponseBodyEvent
from hypercorn.utils import suppress_body

WriteNow = Callable[[bytes], bool]
"""Function that sends a piece of a body, of which more follow. It returns False if nothing was
sent; then the caller sends ASGI's message.
"""


class ByteOutput(Protocol):
    """The destination of a protocol's bytes."""

    @property
    def ready(self) -> bool:
        """Return whether a send can start at once."""

    def send_now(self, data: bytes) -> bool:
        """Send ``data`` if the output is :attr:`ready`, else do nothing and return False.

        The rest of what doesn't leave at once is sent in the background.
        """

    async def send(self, data: bytes | memoryview) -> None:
        """Send ``data`` after the sends that are queued; return when it has left."""

    def note_turn(self, stream_id: int, *, is_servers: bool) -> None:
        """Note whether the server or the client has to act next on a request.

        The client has to act while its request is incomplete, and while it leaves an answer unread.
        """


def body_message(data: bytes, *, more: bool = True) -> HTTPResponseBodyEvent:
    """Return ASGI's message for a piece of a response's body."""
    return {"type": "http.response.body", "body": data, "more_body": more}


class FastPathStream(HTTPStream):
    """One request and its response, on either protocol.

    ``write_piece`` is the protocol's function: it gets the id of the stream and a piece of the body
    that isn't empty, and returns whether it sent the piece.
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
        """Send a piece as :data:`WriteNow` does."""
        if self.closed or self.state is not ASGIHTTPState.RESPONSE or not data:
            return False
        return self._write_piece(self.stream_id, data)


def takes_views(send: ASGISendCallable) -> bool:
    """Return whether the body of a message may be a view of bytes; ASGI leaves that open."""
    return isinstance(getattr(send, "__self__", None), FastPathStream)


def writer_for(send: ASGISendCallable) -> WriteNow | None:
    """Return the fast path for messages that go to ``send``; None if there is none.

    It exists only if ``send`` is our own server's: middleware that wraps ``send`` wants to see
    every message. With TLS each piece has to wait for its turn, and encoding a refused piece would
    be wasted.
    """
    stream = getattr(send, "__self__", None)
    if not isinstance(stream, FastPathStream) or send != stream.app_send:
        return None
    return None if stream.scheme == "https" else stream.write_now
