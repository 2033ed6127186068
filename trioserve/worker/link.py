"""An nng Pair0 socket under trio: one engine, one worker, messages in order.

pynng's own ``arecv`` crosses an nng thread and the GIL, which costs milliseconds beside a busy
event loop, and a cancelled ``asend`` loses its message's memory. So the socket is driven through
its readiness descriptors: try without blocking, wait until readable, try again. Nothing is lost
when a wait is cancelled, because a message is only taken by the call that returns it.

nng never says that the peer is gone; whoever owns the peer's process has to watch it.
"""

from __future__ import annotations

import attrs
import pynng
import trio

from trioserve import wire
from trioserve.errors import NoRoomForWorker, WorkerLost

__all__ = ["NngLink"]


@attrs.define(eq=False)
class NngLink:
    """One end of a link, as :class:`trioserve.worker.Link` describes it."""

    _socket: pynng.Pair0
    _readable_fd: int
    _writable_fd: int
    _closed: bool = False

    @classmethod
    def listen(cls, url: str) -> NngLink:
        """Listen at an ``ipc://`` address, for one worker to dial.

        Raises:
            NoRoomForWorker: that can't be done there.
        """
        try:
            socket = pynng.Pair0(
                listen=url,
                recv_max_size=wire.MAX_MESSAGE_BYTES,
                send_buffer_size=wire.BUFFERED_MESSAGES,
                recv_buffer_size=wire.BUFFERED_MESSAGES,
            )
        except pynng.NNGException as error:
            raise NoRoomForWorker(f"no socket for the worker at {url}: {error}") from error
        return cls(socket, socket.recv_fd, socket.send_fd)

    async def send(self, message: wire.Message) -> None:
        """Hand a message to the socket; waits while its buffer is full.

        Raises:
            WorkerLost: the link is closed, or nng can't go on.
        """
        data = wire.encode(message)
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self._socket.send(data, block=False)
                return
            except pynng.TryAgain:
                await self._wait(self._writable_fd)
            except pynng.Closed:
                raise WorkerLost("the link to the worker is closed") from None
            except pynng.NNGException as error:
                raise WorkerLost(f"the link to the worker failed: {error}") from error

    async def receive(self) -> wire.Message:
        """The next message.

        Raises:
            WorkerLost: the link is closed, nng can't go on, or what came is no message of ours.
        """
        await trio.lowlevel.checkpoint()
        while True:
            try:
                return wire.decode(self._socket.recv(block=False))
            except pynng.TryAgain:
                await self._wait(self._readable_fd)
            except pynng.Closed:
                raise WorkerLost("the link to the worker is closed") from None
            except pynng.NNGException as error:
                raise WorkerLost(f"the link to the worker failed: {error}") from error
            except wire.WireError as error:
                raise WorkerLost(f"the worker sent nonsense: {error}") from error
            except RuntimeError as error:  # pynng can't unpack a message without bytes
                raise WorkerLost(f"the worker sent nonsense: {error}") from error

    def send_nowait(self, message: wire.Message) -> bool:
        """Send if that can be done at once; says whether it was."""
        try:
            self._socket.send(wire.encode(message), block=False)
        except pynng.NNGException:
            return False
        return True

    def close(self) -> None:
        """Close the socket; whoever waits on it gets :exc:`WorkerLost`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for fd in (self._readable_fd, self._writable_fd):
            trio.lowlevel.notify_closing(fd)
        self._socket.close()

    async def _wait(self, fd: int) -> None:
        # nng signals both kinds of readiness by making its descriptor readable.
        try:
            await trio.lowlevel.wait_readable(fd)
        except (trio.ClosedResourceError, OSError):
            raise WorkerLost("the link to the worker is closed") from None
