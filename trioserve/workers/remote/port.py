"""The engine's port for workers and front ends of other hosts.

nng speaks TLS on it, and wants a certificate of the peer. But an nng socket takes one peer at a
time, and tells nothing of the peers that it refuses. So this module accepts the connections, and
has each relayed, still encrypted, to a socket of its own on 127.0.0.1. This finds a closed
connection at once, bounds what a peer may send before it has joined, and logs each that is refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable
from typing import Protocol

import attrs
import pynng
import trio

from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.addresses import host_and_port
from trioserve.protocol.certificates import FRONT_END_NAME, WORKER_NAME
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.joining import Join
from trioserve.protocol.version import __version__
from trioserve.workers.remote.joined import JoinedWorkers
from trioserve.workers.remote.link import RemoteLink
from trioserve.workers.remote.silence import FIRST_TIMEOUT

MAX_JOINING = 64
"""Most connections at a time that haven't joined."""
MAX_BEFORE_JOIN = 64 << 10
"""Most bytes that a peer may send before it has joined: a handshake, and one message."""
MAX_NAME = 255
"""Longest name of a host or an agent."""
CHUNK = 64 << 10
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_DELAY = 0.1
"""Seconds before the next connection is accepted while there are no descriptors."""
_NAMES = {"worker": WORKER_NAME, "front end": FRONT_END_NAME}
"""Names in certificates by role."""

_log = get_logger("trioserve.worker")


class Joined(Protocol):
    """The peers of one role that have joined."""

    @property
    def schema(self) -> str:
        """Hash of the messages, which must be that of a peer."""
        ...

    def obstacle(self, join: Join) -> str | None:
        """Return the reason why a peer isn't wanted; None if it is."""

    def take(self, join: Join, link: RemoteLink) -> None:
        """Take in a peer that has joined over ``link``. Never blocks."""


@attrs.define(eq=False)
class _Peer:
    """A connection to the port."""

    name: str
    """Its address."""
    stream: trio.SocketStream
    link: RemoteLink
    has_joined: bool = False
    num_bytes: int = 0
    """Bytes that it has sent."""


@attrs.define(eq=False, kw_only=True)
class WorkersPort:
    """The port, and the workers and front ends that have joined there.

    Args:
        address: Where to listen: ``ADDRESS:PORT``.
        tls: TLS of the engine.
        timeout: Seconds of silence after which a link counts as lost.
        checksum: Checksum of the model's files, which a worker's must have.
        workers: Gets the workers that join.
        front_ends: Gets the front ends that join, if they may.
    """

    address: str
    tls: pynng.TLSConfig
    timeout: float
    checksum: str
    workers: JoinedWorkers
    front_ends: Joined | None = None
    bound: str = attrs.field(init=False, default="")
    """Address that it listens at, with its port."""
    _num_joining: int = attrs.field(init=False, default=0)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept peers until cancelled. ``task_status`` is told when it listens.

        Raises:
            TrioserveError: The address can't be used.
        """
        host, _, port = self.address.rpartition(":")
        try:
            listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None)
        except OSError as error:
            raise TrioserveError(
                f"can't listen for workers at {self.address}: {error.strerror or error} "
                "(--worker-listen)"
            ) from error
        self.bound = host_and_port(*listeners[0].socket.getsockname()[:2])
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(self._accept, listener, nursery)
            _log.info("listening for other hosts", address=self.bound)
            task_status.started()

    async def wait_complete(self) -> None:
        """Block until there are the workers that the start of an engine without others needs."""
        _log.info("waiting for the first worker to join")
        await self.workers.joins.wait_for(lambda: self.workers.num_serving > 0)

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in OUT_OF_DESCRIPTORS:
                        raise
                    _log.error("no peer can be accepted", reason=error.strerror)
                    await trio.sleep(ACCEPT_DELAY)
                else:
                    nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it is lost, or the engine ends it."""
        name = _peer_name(stream)
        if self._num_joining >= MAX_JOINING:
            _log.warning("peer refused", peer=name, reason="too many connections don't join")
            await trio.aclose_forcefully(stream)
            return
        try:
            socket = PairSocket.listen_tls(self.tls)
        except SocketFailed as error:
            _log.error("peer refused", peer=name, reason=f"no socket for it: {error}")
            await trio.aclose_forcefully(stream)
            return
        link = RemoteLink(socket)
        peer = _Peer(name, stream, link)
        self._num_joining += 1
        try:
            with contextlib.closing(socket):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.run)
                    nursery.start_soon(self._relay, peer)
                    nursery.start_soon(self._join, peer)
                    await link.ended.wait()
                    nursery.cancel_scope.cancel()
        finally:
            link.end("the engine ends")
            if not peer.has_joined:
                self._num_joining -= 1
                _log.warning("peer refused", peer=name, reason=str(link.loss))

    # ---- the first message

    async def _join(self, peer: _Peer) -> None:
        link = peer.link
        with trio.move_on_after(FIRST_TIMEOUT) as scope:
            data = await link.receive_bytes()
        if scope.cancelled_caught:
            link.end(f"it didn't join within {FIRST_TIMEOUT:g} s")
            return
        try:
            join = wire.decode(data)
        except wire.WireError:
            join = None
        if not isinstance(join, Join):
            link.end("its first message isn't Join; is it another version of trioserve?")
            return
        reason = self._obstacle(join, link.socket.peer_name)
        if reason is not None:
            await link.refuse(reason, final=True)
            return
        peer.has_joined = True
        self._num_joining -= 1
        link.agree(self.timeout)
        _log.info(f"{join.role} joined", peer=peer.name, host=join.host)
        joined = self._joined_as(join)
        assert joined is not None
        joined.take(join, link)

    def _joined_as(self, join: Join) -> Joined | None:
        """Return the peers of a role; None if there may be none."""
        return self.workers if join.role == "worker" else self.front_ends

    def _obstacle(self, join: Join, certified: str) -> str | None:
        """Return the reason why a peer can't serve this engine; None if it can.

        ``certified`` is the name in its certificate.
        """
        joined = self._joined_as(join)
        if joined is None:
            return (
                "the engine takes no front ends of other hosts: "
                "start it with --api-server-count 2 or more"
            )
        if (join.protocol, join.schema) != (wire.PROTOCOL_VERSION, joined.schema):
            return (
                f"the {join.role}'s host has trioserve {join.version} (protocol {join.protocol}, "
                f"{join.schema}), the engine's {__version__} ({wire.PROTOCOL_VERSION}, "
                f"{joined.schema}): install the same version on both"
            )
        if certified != _NAMES[join.role]:
            return f"a {join.role} needs a certificate for {_NAMES[join.role]}; it has {certified}"
        if join.checksum != self.checksum:
            return (
                f"the model on the {join.role}'s host has the checksum {join.checksum}, the "
                f"engine's {self.checksum}: give both the same MODEL"
            )
        if not 0 < len(join.id) <= MAX_NAME or not len(join.host) <= MAX_NAME:
            return f"a host's and an agent's name have at most {MAX_NAME} characters"
        return joined.obstacle(join)

    # ---- the relay

    async def _relay(self, peer: _Peer) -> None:
        """Relay bytes between the peer and its nng socket until one of them closes."""
        link = peer.link
        async with peer.stream:
            try:
                inner = await trio.open_tcp_stream("127.0.0.1", link.socket.port)
            except OSError as error:
                link.end(f"no connection to its socket: {error}")
                return
            async with inner, trio.open_nursery() as nursery:
                closed = functools.partial(_note_closed, peer)
                ended = functools.partial(_note_ended, peer)
                count = functools.partial(_count, peer)
                nursery.start_soon(_copy, peer.stream, inner, closed, ended, count)
                nursery.start_soon(_copy, inner, peer.stream, ended, closed)
                await link.ended.wait()
                nursery.cancel_scope.cancel()


def _count(peer: _Peer, num_bytes: int) -> None:
    """Count bytes of a peer; end its link if they are too many before it has joined."""
    peer.num_bytes += num_bytes
    if not peer.has_joined and peer.num_bytes > MAX_BEFORE_JOIN:
        peer.link.end(f"it sent more than {MAX_BEFORE_JOIN >> 10} KiB before it joined")


def _note_closed(peer: _Peer, why: str) -> None:
    """End the link of a peer that has closed its connection."""
    is_known = peer.has_joined or peer.link.socket.is_connected
    peer.link.end(why if is_known else f"{why} before it had shown a certificate")


def _note_ended(peer: _Peer, _: str) -> None:
    """End the link of a peer whose connection nng has closed."""
    if peer.has_joined or peer.link.socket.is_connected:
        most = wire.MAX_MESSAGE_BYTES >> 20
        why = f"nng closed the connection: damaged, or a message of more than {most} MiB"
    else:
        why = "there was no TLS handshake with a certificate of the engine's authority"
    peer.link.end(why)


async def _copy(
    source: trio.SocketStream,
    target: trio.SocketStream,
    on_source_end: Callable[[str], None],
    on_target_end: Callable[[str], None],
    count: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy bytes until one of the streams closes; then call its function with the reason."""
    while True:
        try:
            data = await source.receive_some(CHUNK)
        except trio.BrokenResourceError as error:
            on_source_end(f"the connection broke: {error.__cause__ or error}")
            return
        if not data:
            on_source_end("its host closed the connection")
            return
        count(len(data))
        try:
            await target.send_all(data)
        except trio.BrokenResourceError as error:
            on_target_end(f"the connection broke: {error.__cause__ or error}")
            return


def _peer_name(stream: trio.SocketStream) -> str:
    try:
        return host_and_port(*stream.socket.getpeername()[:2])
    except OSError:
        return "unknown"
