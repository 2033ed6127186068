"""The sockets that the server listens on. What can't be listened on is one clear line."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterable, Iterator

import attrs
import trio

from trioserve.config import ServerConfig
from trioserve.errors import TrioserveError
from trioserve.http.tls import tls_context

__all__ = [
    "Listening",
    "check_address",
    "inherited",
    "open_listening",
    "removing_socket_file",
]

BACKLOG = 2048


@attrs.frozen
class Listening:
    """Open listeners, their addresses as URLs (``unix:/path`` for a Unix socket), and any TLS."""

    listeners: list[trio.SocketListener]
    urls: list[str]
    tls: ssl.SSLContext | None

    @property
    def descriptors(self) -> list[int]:
        """The listening sockets' descriptors, for other processes to inherit."""
        return [listener.socket.fileno() for listener in self.listeners]

    def close(self) -> None:
        """Close every listener. Idempotent."""
        for listener in self.listeners:
            listener.socket.close()


async def open_listening(config: ServerConfig) -> Listening:
    """Listen as ``config`` says.

    Raises:
        TrioserveError: the address is in use, unknown or not allowed; or TLS can't be set up.
    """
    tls = tls_context(config)
    if config.uds is not None:
        return _listen_on_path(config.uds, tls)
    try:
        listeners = await trio.open_tcp_listeners(config.port, host=config.host, backlog=BACKLOG)
    except OSError as error:
        place = f"{config.host}:{config.port}"
        raise TrioserveError(f"can't listen on {place}: {_why(error)}") from error
    scheme = "http" if tls is None else "https"
    return Listening(listeners, [_url(scheme, listener.socket) for listener in listeners], tls)


def inherited(config: ServerConfig, descriptors: Iterable[int]) -> Listening:
    """What another process has opened for this one by :func:`open_listening`.

    Raises:
        TrioserveError: TLS can't be set up.
    """
    tls = tls_context(config)
    listeners = [
        trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
        for descriptor in descriptors
    ]
    return Listening(listeners, [], tls)


async def check_address(config: ServerConfig) -> None:
    """See whether :func:`open_listening` would work, and leave no trace.

    Raises:
        TrioserveError: it would not.
    """
    listening = await open_listening(config)
    with removing_socket_file(config):
        listening.close()


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the address is in use"
    return error.strerror or str(error)


def _url(scheme: str, sock: trio.socket.SocketType) -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listen_on_path(path: str, tls: ssl.SSLContext | None) -> Listening:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise TrioserveError(f"can't listen on {path}: {_why(error)}") from error
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    return Listening([listener], [f"unix:{path}"], tls)


def _remove_dead_socket(path: str) -> None:
    """Take away a socket file that a server which is gone has left."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            raise OSError(errno.EADDRINUSE, "busy") from None
        else:
            raise OSError(errno.EADDRINUSE, "busy")


@contextlib.contextmanager
def removing_socket_file(config: ServerConfig) -> Iterator[None]:
    """Take the file of a Unix socket away when the block is left."""
    try:
        yield
    finally:
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)
