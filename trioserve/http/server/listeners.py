"""The sockets that the server listens on. An address that can't be used is reported in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
import sys
from collections.abc import Iterable, Iterator

import attrs
import trio

from trioserve.config import ServerConfig
from trioserve.http.server.tls import tls_context
from trioserve.protocol.addresses import host_and_port
from trioserve.protocol.errors import TrioserveError

BACKLOG = 2048


@attrs.frozen
class OpenListeners:
    """Open listeners, their addresses as URLs (``unix:/path`` for a Unix socket), and any TLS."""

    listeners: list[trio.SocketListener]
    urls: list[str]
    tls: ssl.SSLContext | None
    others: list[trio.SocketListener] = attrs.field(factory=list)
    """Listeners of other processes, accepted from only while those processes don't."""

    def close(self) -> None:
        """Close every listener. Idempotent."""
        for listener in (*self.listeners, *self.others):
            listener.socket.close()


@attrs.frozen
class SharedListening:
    """Sockets shared by several processes: the descriptors of each process's own.

    On systems that spread connections evenly over sockets of one address, each process has its own
    socket; else all share one.
    """

    by_process: list[list[int]]
    urls: list[str]
    _sockets: list[socket.socket]

    @property
    def descriptors(self) -> list[int]:
        """Return all descriptors, each once."""
        return [each.fileno() for each in self._sockets]

    def close(self) -> None:
        """Close every socket in this process. Idempotent."""
        for each in self._sockets:
            each.close()


async def open_listening(config: ServerConfig) -> OpenListeners:
    """Open the listeners that ``config`` asks for.

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
    return OpenListeners(listeners, [_url(scheme, listener.socket) for listener in listeners], tls)


async def open_shared_listening(config: ServerConfig, count: int) -> SharedListening:
    """Open listeners for ``count`` processes to inherit.

    Raises:
        TrioserveError: as :func:`open_listening`.
    """
    # No other program may listen there; sockets that share an address don't notice each other.
    listening = await open_listening(config)
    if config.uds is not None or sys.platform != "linux":
        sockets = [
            socket.socket(fileno=os.dup(each.socket.fileno())) for each in listening.listeners
        ]
        listening.close()
        own = [each.fileno() for each in sockets]
        return SharedListening([own] * count, listening.urls, sockets)
    addresses = [(each.socket.family, each.socket.getsockname()) for each in listening.listeners]
    listening.close()
    try:
        rows = [
            [_listen_beside_others(family, address) for family, address in addresses]
            for _ in range(count)
        ]
    except OSError as error:
        place = f"{config.host}:{config.port}"
        raise TrioserveError(f"can't listen on {place}: {_why(error)}") from error
    sockets = [each for row in rows for each in row]
    by_process = [[each.fileno() for each in row] for row in rows]
    return SharedListening(by_process, listening.urls, sockets)


def _listen_beside_others(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def inherited(config: ServerConfig, own: Iterable[int], others: Iterable[int]) -> OpenListeners:
    """Return the listeners that another process opened by :func:`open_shared_listening`.

    Raises:
        TrioserveError: TLS can't be set up.
    """
    tls = tls_context(config)
    return OpenListeners(_listeners(own), [], tls, _listeners(others))


def _listeners(descriptors: Iterable[int]) -> list[trio.SocketListener]:
    return [
        trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
        for descriptor in descriptors
    ]


async def check_address(config: ServerConfig) -> None:
    """Check that :func:`open_listening` would work, without leaving anything behind.

    Raises:
        TrioserveError: it wouldn't.
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
    return f"{scheme}://{host_and_port(host, port)}"


def _listen_on_path(path: str, tls: ssl.SSLContext | None) -> OpenListeners:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise TrioserveError(f"can't listen on {path}: {_why(error)}") from error
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    return OpenListeners([listener], [f"unix:{path}"], tls)


def _remove_dead_socket(path: str) -> None:
    """Remove the socket file that a dead server has left."""
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
    """Remove the file of a Unix socket at the end of the block."""
    try:
        yield
    finally:
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)
