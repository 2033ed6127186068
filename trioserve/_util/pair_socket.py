"""An nng Pair0 socket under trio: ordered messages of bytes between two local processes.

pynng's own ``arecv`` crosses an nng thread and the GIL, which costs milliseconds beside a busy
event loop, and a cancelled ``asend`` leaks its message's memory. So the socket is driven through
its readiness descriptors: try without blocking, wait until readable, try again. A cancelled wait
loses no message, because only the call that returns a message takes it.

nng never reports that the peer is gone; the owner of the peer's process has to watch it.
"""

from __future__ import annotations

import attrs
import pynng
import trio

from trioserve.protocol import wire


class SocketFailed(Exception):
    """The socket can't be opened, or nng failed; the text says why."""


class SocketClosed(SocketFailed):
    """The socket was closed on this side."""


@attrs.define(eq=False)
class PairSocket:
    """One end of a pair. One task sends and one receives at a time."""

    _socket: pynng.Pair0
    _readable_fd: int
    _writable_fd: int
    _closed: bool = False

    @classmethod
    def listen(cls, url: str) -> PairSocket:
        """Listen at an ``ipc://`` address, for one peer to dial.

        Raises:
            SocketFailed: The address can't be used.
        """
        return cls._open(listen=url)

    @classmethod
    def dial(cls, url: str) -> PairSocket:
        """Connect to a listener at an ``ipc://`` address.

        Raises:
            SocketFailed: There is no listener.
        """
        return cls._open(dial=url, block_on_dial=True)

    @classmethod
    def _open(cls, **how: str | bool) -> PairSocket:
        try:
            socket = pynng.Pair0(
                **how,
                recv_max_size=wire.MAX_MESSAGE_BYTES,
                send_buffer_size=wire.BUFFERED_MESSAGES,
                recv_buffer_size=wire.BUFFERED_MESSAGES,
            )
        except pynng.NNGException as error:
            raise SocketFailed(str(error)) from error
        return cls(socket, socket.recv_fd, socket.send_fd)

    async def send(self, data: bytes) -> None:
        """Hand a message to the socket; block while its buffer is full.

        Raises:
            SocketClosed: The socket is closed.
            SocketFailed: nng failed.
        """
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self._socket.send(data, block=False)
                return
            except pynng.TryAgain:
                await self._wait(self._writable_fd)
            except pynng.Closed:
                raise SocketClosed("closed") from None
            except pynng.NNGException as error:
                raise SocketFailed(str(error)) from error

    async def receive(self) -> bytes:
        """Return the next message.

        Raises:
            SocketClosed: The socket is closed.
            SocketFailed: nng failed.
        """
        await trio.lowlevel.checkpoint()
        while True:
            try:
                data: bytes = self._socket.recv(block=False)
                return data
            except pynng.TryAgain:
                await self._wait(self._readable_fd)
            except pynng.Closed:
                raise SocketClosed("closed") from None
            except pynng.NNGException as error:
                raise SocketFailed(str(error)) from error
            except RuntimeError:  # pynng can't unpack an empty message.
                return b""

    def send_nowait(self, data: bytes) -> bool:
        """Send a message if that can be done at once; return True if it was sent."""
        try:
            self._socket.send(data, block=False)
        except pynng.NNGException:
            return False
        return True

    def close(self) -> None:
        """Close the socket; tasks that wait on it get :exc:`SocketClosed`. Idempotent."""
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
            raise SocketClosed("closed") from None
