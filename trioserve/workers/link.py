"""The link to a worker: messages over an nng socket, in order.

nng never reports that the peer is gone; the owner of the peer's process has to watch it.
:mod:`trioserve.workers.remote` has the links to other hosts.
"""

from __future__ import annotations

from typing import NoReturn

import attrs

from trioserve._util.pair_socket import PairSocket, SocketClosed, SocketFailed
from trioserve.protocol import wire
from trioserve.protocol.errors import NoRoomForWorker, WorkerLost


@attrs.define(eq=False)
class LinkTraffic:
    """Measures of the links to one worker, over all of its lives."""

    host: str | None = None
    """Name of the worker's host; None if that is the engine's."""
    plan_bytes: int = 0
    """Bytes of all plans sent."""
    round_trip: float | None = None
    """Seconds from the last heartbeat to its answer; None on the engine's host."""

    def count(self, message: wire.Message, data: bytes) -> None:
        """Count ``message``, which is sent as ``data``."""
        if isinstance(message, wire.Plan):
            self.plan_bytes += len(data)


@attrs.define(eq=False)
class NngLink:
    """One end of a link, as :class:`trioserve.workers.Link` describes it."""

    socket: PairSocket
    traffic: LinkTraffic = attrs.field(factory=LinkTraffic)

    @classmethod
    def listen(cls, url: str, traffic: LinkTraffic | None = None) -> NngLink:
        """Listen at an ``ipc://`` address, for one worker to dial.

        Raises:
            NoRoomForWorker: The address can't be used.
        """
        try:
            return cls(PairSocket.listen(url), traffic or LinkTraffic())
        except SocketFailed as error:
            raise NoRoomForWorker(f"no socket for the worker at {url}: {error}") from error

    async def send(self, message: wire.Message) -> None:
        """Send a message to the socket; block while its buffer is full.

        Raises:
            WorkerLost: The link is closed, or nng failed.
        """
        data = wire.encode(message)
        self.traffic.count(message, data)
        try:
            await self.socket.send(data)
        except SocketFailed as error:
            _raise_lost(error)

    async def receive(self) -> wire.Message:
        """Return the next message.

        Raises:
            WorkerLost: The link is closed, nng failed, or the message is invalid.
        """
        try:
            return wire.decode(await self.socket.receive())
        except SocketFailed as error:
            _raise_lost(error)
        except wire.WireError as error:
            raise WorkerLost(f"the worker sent an invalid message: {error}") from error

    def send_nowait(self, message: wire.Message) -> bool:
        """Send a message if that can be done at once; return True if it was sent."""
        return self.socket.send_nowait(wire.encode(message))

    def close(self) -> None:
        """Close the socket; tasks that wait on it get :exc:`WorkerLost`. Idempotent."""
        self.socket.close()


def _raise_lost(error: SocketFailed) -> NoReturn:
    if isinstance(error, SocketClosed):
        raise WorkerLost("the link to the worker is closed") from None
    raise WorkerLost(f"the link to the worker failed: {error}") from error
