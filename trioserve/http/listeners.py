"""The sockets that the server listens on. What can't be listened on is one clear line."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

import attrs
import trio

from trioserve.config import ServerConfig
from trioserve.errors import TrioserveError

__all__ = ["Listening", "check_address", "open_listening", "removing_socket_file"]

BACKLOG = 2048


@attrs.frozen
class Listening:
    """Open listeners, and their addresses as URLs (``unix:/path`` for a Unix socket)."""

    listeners: list[trio.SocketListener]
    urls: list[str]

    def close(self) -> None:
        """Close every listener. Idempotent."""
        for listener in self.listeners:
            listener.socket.close()


async def open_listening(config: ServerConfig) -> Listening:
    """Listen as ``config`` says.

    Raises:
        TrioserveError: the address is in use, unknown or not allowed.
    """
    if config.uds is not None:
        return _listen_on_path(config.uds)
    try:
        listeners = await trio.open_tcp_listeners(config.port, host=config.host, backlog=BACKLOG)
    except OSError as error:
        place = f"{config.host}:{config.port}"
        raise TrioserveError(f"can't listen on {place}: {_why(error)}") from error
    return Listening(listeners, [_url(listener.socket) for listener in listeners])


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


def _url(sock: trio.socket.SocketType) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen_on_path(path: str) -> Listening:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise TrioserveError(f"can't listen on {path}: {_why(error)}") from error
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    return Listening([listener], [f"unix:{path}"])


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
