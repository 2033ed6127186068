"""An nng Pair0 socket under trio: ordered messages of bytes between two processes.

pynng's own ``arecv`` crosses an nng thread and the GIL, which costs milliseconds beside a busy
event loop, and a cancelled ``asend`` leaks its message's memory. So the socket is driven through
its readiness descriptors: try without blocking, wait until readable, try again. A cancelled wait
loses no message, because only the call that returns a message takes it.

nng never reports to a waiting call that the peer is gone; the socket's owner has to watch the
peer's process, or the connection.
"""

from __future__ import annotations

import contextlib
import functools
import socket as sockets
from collections.abc import Callable
from typing import Protocol

import attrs
import pynng
import trio

from trioserve.protocol import wire

_PEER_NAME = pynng.nng.StringOption("tls-peer-cn")


class SocketFailed(Exception):
    """The socket can't be opened, or nng failed; the text says why."""


class SocketClosed(SocketFailed):
    """The socket was closed on this side."""


class MessageSocket(Protocol):
    """One end of a connection for messages of bytes, which come in order."""

    async def send(self, data: bytes) -> None:
        """Send a message. Raises ``SocketFailed``."""

    async def receive(self) -> bytes:
        """Return the next message. Raises ``SocketFailed``."""
        ...


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
    def listen_tls(cls, config: pynng.TLSConfig) -> PairSocket:
        """Listen at a free port of 127.0.0.1 with TLS, for one peer to dial.

        Raises:
            SocketFailed: There is no port.
        """
        return cls._open(listen="tls+tcp://127.0.0.1:0", tls_config=config)

    @classmethod
    async def dial_tls(
        cls, address: str, config: pynng.TLSConfig, on_lost: Callable[[], None]
    ) -> PairSocket:
        """Connect to a listener with TLS at ``HOST:PORT``.

        ``on_lost`` is called once the connection is lost. nng would then connect again by itself,
        so the socket has to be closed.

        Raises:
            SocketFailed: There is no listener, or it or this end has no valid certificate.
        """
        opened = cls._open(tls_config=config)
        token = trio.lowlevel.current_trio_token()

        def tell(_: object) -> None:  # on a thread of nng
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(on_lost)

        opened._socket.add_post_pipe_remove_cb(tell)
        dial = functools.partial(opened._socket.dial, f"tls+tcp://{address}", block=True)
        try:
            # Closing the socket ends the thread.
            await trio.to_thread.run_sync(dial, abandon_on_cancel=True)
        except pynng.NNGException as error:
            opened.close()
            is_tls = isinstance(error, pynng.CryptoError)
            why = "TLS failed: no valid certificate of the same authority" if is_tls else error
            raise SocketFailed(str(why)) from error
        except BaseException:
            opened.close()
            raise
        return opened

    @classmethod
    def _open(cls, **how: object) -> PairSocket:
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

    @property
    def port(self) -> int:
        """Port at which the socket listens."""
        (listener,) = self._socket.listeners
        return sockets.ntohs(listener.local_address.port)

    @property
    def is_connected(self) -> bool:
        """True while there is a peer, after its TLS handshake."""
        return bool(self._socket.pipes)

    @property
    def peer_name(self) -> str:
        """Name in the certificate of the peer; empty if there is none, or no peer."""
        for pipe in self._socket.pipes:
            with contextlib.suppress(pynng.NNGException):  # It may just have been closed.
                return str(_PEER_NAME.__get__(pipe, None))
        return ""

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
        # A message that has been taken must not be lost to a cancellation, and a wait is a
        # checkpoint already.
        await trio.lowlevel.checkpoint_if_cancelled()
        if (data := self._take()) is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return data
        while data is None:
            await self._wait(self._readable_fd)
            data = self._take()
        return data

    def _take(self) -> bytes | None:
        """Return the next message if there is one."""
        try:
            data: bytes = self._socket.recv(block=False)
        except pynng.TryAgain:
            return None
        except pynng.Closed:
            raise SocketClosed("closed") from None
        except pynng.NNGException as error:
            raise SocketFailed(str(error)) from error
        except RuntimeError:  # pynng can't unpack an empty message.
            return b""
        return data

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
