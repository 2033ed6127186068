"""TLS handshakes, with a limit on how many advance together and on how much each may send.

A handshake costs the server a signature, which takes milliseconds with a large key. Hundreds of
handshakes advancing at once would delay all requests.
"""

from __future__ import annotations

import contextlib

import trio

from trioserve.http.server.settings import MAX_HEAD_SIZE
from trioserve.observability.logs import get_logger

HANDSHAKES_TOGETHER = 8
"""Handshakes that advance in one turn of the event loop: 50 ms with a key of 4096 bits."""
LINGER = 2.0
"""Seconds to keep reading from a client that is still sending after our last bytes. Without it, the
client's system may discard the answer.
"""
_NO_TLS = (
    b"HTTP/1.1 400 \r\nConnection: close\r\nContent-Type: text/plain\r\n\r\n"
    b"This is a port for TLS: use https://\n"
)

_log = get_logger("trioserve.http")


class HandshakeStream(trio.abc.Stream):
    """Stream below TLS of one connection, which takes turns with others until its handshake is
    done.

    Args:
        stream: The connection.
        turns: Permits of handshakes; a handshake holds one for a turn of the event loop.
    """

    def __init__(self, stream: trio.SocketStream, turns: trio.Semaphore) -> None:
        self._stream = stream
        self._turns: trio.Semaphore | None = turns
        self._size = 0

    def note_done(self) -> None:
        """Note that the handshake is done: what follows has other limits."""
        self._turns = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Receive bytes, and wait for this handshake's turn.

        Raises:
            trio.BrokenResourceError: the connection is broken, or the handshake is too large.
        """
        data = await self._stream.receive_some(max_bytes)
        if self._turns is not None:
            self._size += len(data)
            if self._size > MAX_HEAD_SIZE:
                raise trio.BrokenResourceError("the handshake is too large")
            async with self._turns:
                await trio.lowlevel.checkpoint()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Block until there may be room for more."""
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()


async def refuse_without_tls(sock: trio.socket.SocketType, error: BaseException) -> None:
    """Log why a handshake failed, and answer a client that speaks HTTP without TLS."""
    _log.info("a client couldn't set up TLS", reason=getattr(error, "reason", str(error)))
    if getattr(error, "reason", None) == "HTTP_REQUEST":
        with contextlib.suppress(OSError), trio.move_on_after(LINGER):
            await sock.send(_NO_TLS)
