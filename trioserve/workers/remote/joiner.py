"""A process that joins an engine on another host, over again whenever the link is lost."""

from __future__ import annotations

import contextlib
import secrets
import socket

import attrs
import pynng
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, TrioserveError, WorkerLost
from trioserve.protocol.joining import Join, JoinRefusal, Role
from trioserve.protocol.version import __version__
from trioserve.workers.remote.link import RemoteLink
from trioserve.workers.remote.silence import FIRST_TIMEOUT
from trioserve.workers.supervisor import delay_after

FIRST_DELAY = 1.0
"""Seconds before a process joins again: on shared cores its start would slow down those that take
over its requests."""
MAX_DELAY = 5.0
"""Most seconds between two attempts to join."""

_log = get_logger("trioserve.worker")


class JoinRefused(Exception):
    """The engine has refused the process."""

    def __init__(self, refusal: JoinRefusal) -> None:
        super().__init__(refusal.reason)
        self.is_final = refusal.final


@attrs.define(eq=False, kw_only=True)
class Joiner:
    """The base of a worker's agent and of a front end on another host.

    Args:
        engine: Address of the engine's port: ``HOST:PORT``.
        tls: TLS of this side.
        model: Path of the model on this host.
        checksum: Checksum of its files.
        host: Name of this host for the engine.
        id: Name by which the engine knows the process when it joins again.
        leaving: Set by :meth:`leave`, or from outside to the same effect.
    """

    engine: str
    tls: pynng.TLSConfig
    model: str
    checksum: str
    host: str = attrs.field(factory=socket.gethostname)
    id: str = attrs.field(factory=lambda: secrets.token_hex(16))
    _leaving: trio.Event = attrs.field(factory=trio.Event)
    _attempts: int = attrs.field(init=False, default=0)
    """Failed attempts to serve, in a row."""

    @property
    def role(self) -> Role:
        """Its part in the server."""
        raise NotImplementedError

    @property
    def schema(self) -> str:
        """Hash of its messages, which must be the engine's."""
        return wire.schema_hash()

    async def serve(self, link: RemoteLink, nursery: trio.Nursery) -> None:
        """Serve the engine over ``link`` until the process leaves or the link is lost.

        Tasks of ``nursery`` end with it. A lost link cancels it.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Have :meth:`run` end in order, and return."""
        self._leaving.set()

    async def run(self) -> None:
        """Serve the engine until :meth:`leave`, over again whenever the link is lost.

        Raises:
            TrioserveError: The engine has refused the process for good.
        """
        while not self._leaving.is_set():
            try:
                await self._serve_once()
            except JoinRefused as refusal:
                if refusal.is_final:
                    message = f"the engine refused the {self.role}: {refusal}"
                    raise TrioserveError(message) from None
                self._log_failure(f"the engine refused the {self.role}: {refusal}")
            except SocketFailed as error:
                self._log_failure(f"can't join: {error}")
            except (EngineError, WorkerLost) as error:
                self._log_failure(str(error))
            self._attempts += 1
            with trio.move_on_after(delay_after(self._attempts, FIRST_DELAY, MAX_DELAY)):
                await self._leaving.wait()

    def _log_failure(self, reason: str) -> None:
        _log.warning("not serving", engine=self.engine, reason=reason, attempts=self._attempts + 1)

    async def _serve_once(self) -> None:
        """Join and serve the engine until the link is lost, or what it serves with.

        Raises:
            SocketFailed: The engine can't be reached.
            WorkerLost: The link was lost, or what it serves with.
            EngineError: The engine has failed.
            JoinRefused: The engine refused the process.
        """
        lost = trio.Event()
        with trio.move_on_after(FIRST_TIMEOUT) as scope:
            opened = await PairSocket.dial_tls(self.engine, self.tls, lost.set)
        if scope.cancelled_caught:
            raise SocketFailed(f"no connection within {FIRST_TIMEOUT:g} s")
        link = RemoteLink(opened)
        failure: BaseException | None = None
        try:
            with contextlib.closing(opened):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.run)
                    nursery.start_soon(_end_when, lost, link)
                    nursery.start_soon(_raise_loss, link)
                    await link.send(self.join_message())
                    await self.serve(link, nursery)
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        if failure is not None and not self._leaving.is_set():
            raise failure

    def join_message(self) -> Join:
        """Return the first message."""
        return Join(
            role=self.role,
            protocol=wire.PROTOCOL_VERSION,
            schema=self.schema,
            version=__version__,
            id=self.id,
            host=self.host,
            checksum=self.checksum,
        )


def raise_refusal(data: bytes) -> None:
    """Raise the refusal that a message may be.

    Raises:
        JoinRefused: It is one.
        WorkerLost: It begins like one.
    """
    if wire.has_tag(data, JoinRefusal):
        try:
            refusal = wire.decode(data)
        except wire.WireError as error:
            raise WorkerLost(f"the engine sent an invalid message: {error}") from error
        assert isinstance(refusal, JoinRefusal)
        raise JoinRefused(refusal)


async def _end_when(lost: trio.Event, link: RemoteLink) -> None:
    await lost.wait()
    link.end("the connection to the engine was closed")


async def _raise_loss(link: RemoteLink) -> None:
    loss = await link.wait_lost()
    raise WorkerLost(f"the engine was lost: {loss}")
