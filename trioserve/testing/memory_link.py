"""A link without a socket, between an engine and a fake worker in one process."""

from __future__ import annotations

import contextlib
import math

import attrs
import trio

from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost


@attrs.define(eq=False)
class MemoryLink:
    """One end of a link (:class:`trioserve.workers.Link`) over memory channels.

    Messages are encoded and decoded as on a socket.
    """

    _to_peer: trio.MemorySendChannel[bytes]
    _from_peer: trio.MemoryReceiveChannel[bytes]

    async def send(self, message: wire.Message) -> None:
        """Send ``message``. The buffer is unbounded.

        Raises:
            WorkerLost: One of the ends is closed.
        """
        await trio.lowlevel.checkpoint()
        self.send_nowait(message)

    def send_nowait(self, message: wire.Message) -> None:
        """Send ``message`` without a checkpoint."""
        try:
            self._to_peer.send_nowait(wire.encode(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise WorkerLost("the link is closed") from None

    async def receive(self) -> wire.Message:
        """Return the next message; messages sent before a close are still received.

        Raises:
            WorkerLost: One of the ends is closed.
        """
        try:
            return wire.decode(await self._from_peer.receive())
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise WorkerLost("the link is closed") from None

    def receive_waiting(self) -> list[wire.Message]:
        """Return the messages in the buffer, without waiting."""
        found: list[wire.Message] = []
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                found.append(wire.decode(self._from_peer.receive_nowait()))
        return found

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._to_peer.close()
        self._from_peer.close()


def memory_link_pair() -> tuple[MemoryLink, MemoryLink]:
    """Return two ends of a link: the engine's and the worker's."""
    to_worker, from_engine = trio.open_memory_channel[bytes](math.inf)
    to_engine, from_worker = trio.open_memory_channel[bytes](math.inf)
    return MemoryLink(to_worker, from_worker), MemoryLink(to_engine, from_engine)
