"""``trioserve worker``: the agent that serves an engine on another host with a worker process.

The agent joins, starts a worker process when the engine tells what to load, and passes messages on.
It answers heartbeats itself, because a worker that computes a step can't. When the link or the
worker process is lost, the agent ends the other one, so nothing of the engine's state remains, and
joins again.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import pynng
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.devices import split_device
from trioserve.protocol.errors import EngineError, TrioserveError, WorkerLost
from trioserve.protocol.joining import Join, JoinRefusal, WorkerEnd
from trioserve.protocol.version import __version__
from trioserve.workers.process import WorkerProcess, open_process
from trioserve.workers.remote.link import RemoteLink
from trioserve.workers.remote.silence import FIRST_TIMEOUT
from trioserve.workers.supervisor import delay_after

FIRST_DELAY = 0.5
MAX_DELAY = 5.0
"""Most seconds between two attempts to join."""
LEAVE_GRACE = 2.0
"""Seconds for the engine to close the link of an agent that leaves."""

_log = get_logger("trioserve.worker")


class _Refused(Exception):
    """The engine doesn't want the worker."""

    def __init__(self, refusal: JoinRefusal) -> None:
        super().__init__(refusal.reason)
        self.is_final = refusal.final


@attrs.define(eq=False, kw_only=True)
class Agent:
    """The agent of one worker.

    Args:
        engine: Address of the engine's port: ``HOST:PORT``.
        tls: TLS of a worker's host.
        model: Path of the model on this host.
        checksum: Checksum of its files.
        device: Device in place of the engine's choice, if given.
        num_threads: Threads in place of the engine's choice, if given.
        host: Name of this host for the engine.
    """

    engine: str
    tls: pynng.TLSConfig
    model: str
    checksum: str
    device: str | None = None
    num_threads: int | None = None
    host: str = attrs.field(factory=socket.gethostname)
    _id: str = attrs.field(init=False, factory=lambda: secrets.token_hex(16))
    _leaving: trio.Event = attrs.field(init=False, factory=trio.Event)
    _attempts: int = attrs.field(init=False, default=0)
    """Failed attempts to serve, in a row."""

    def leave(self) -> None:
        """Have :meth:`run` tell the engine that the worker ends, and return."""
        self._leaving.set()

    async def run(self) -> None:
        """Serve the engine until :meth:`leave`, over again whenever the link is lost.

        Raises:
            TrioserveError: The engine has refused the worker for good.
        """
        while not self._leaving.is_set():
            try:
                await self._serve_once()
            except _Refused as refusal:
                if refusal.is_final:
                    raise TrioserveError(f"the engine refused the worker: {refusal}") from None
                self._log_failure(f"the engine refused the worker: {refusal}")
            except SocketFailed as error:
                self._log_failure(f"can't join: {error}")
            except WorkerLost as error:
                self._log_failure(str(error))
            self._attempts += 1
            with trio.move_on_after(delay_after(self._attempts, FIRST_DELAY, MAX_DELAY)):
                await self._leaving.wait()

    def _log_failure(self, reason: str) -> None:
        _log.warning("not serving", engine=self.engine, reason=reason, attempts=self._attempts + 1)

    async def _serve_once(self) -> None:
        """Join and serve the engine until the link or the worker process is lost.

        Raises:
            SocketFailed: The engine can't be reached.
            WorkerLost: The link or the process was lost.
            _Refused: The engine refused the worker.
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
                    nursery.start_soon(self._tell_leaving, link)
                    await self._join(link)
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        if failure is not None and not self._leaving.is_set():
            raise failure

    async def _tell_leaving(self, link: RemoteLink) -> None:
        await self._leaving.wait()
        with trio.move_on_after(LEAVE_GRACE):
            reason = f"its agent at {self.host} ends"
            await link.send(WorkerEnd(reason=reason, from_outside=True, leaves=True))
            await link.ended.wait()
        link.end("the agent ends")

    async def _join(self, link: RemoteLink) -> None:
        join = Join(
            protocol=wire.PROTOCOL_VERSION,
            schema=wire.schema_hash(),
            version=__version__,
            id=self._id,
            host=self.host,
            checksum=self.checksum,
        )
        await link.send(join)
        start = _decoded(await link.receive_bytes())
        if not isinstance(start, wire.Start):
            raise WorkerLost(f"the engine sent {type(start).__name__} where Start was due")
        _log.info("joined", engine=self.engine, host=self.host)
        link.agree(start.link_timeout)
        missing = self._missing(start)
        if missing is not None:
            await link.send(wire.Failure(number=0, message=missing, fatal=True))
            _decoded(await link.receive_bytes())
            raise WorkerLost(missing)
        async with open_process() as worker:
            try:
                await self._pass_on(link, worker, self._for_this_host(start))
            except WorkerLost as error:
                # The process may have ended because of the link's loss, or the reverse.
                if not link.ended.is_set():
                    await _tell_end(link, error)
                raise

    def _for_this_host(self, start: wire.Start) -> wire.Start:
        """Return ``start`` with what is this host's own."""
        device, cores = split_device(self.device or start.device)
        return attrs.evolve(
            start,
            model=self.model,
            device=device,
            cores=cores,
            num_threads=self.num_threads or start.num_threads,
        )

    def _missing(self, start: wire.Start) -> str | None:
        """Return an error if a file of the engine isn't on this host; None if there are all."""
        draft = "" if start.speculative is None else start.speculative.model or ""
        for path, name in (
            (start.tokenizer, "--tokenizer"),
            (start.weights, "the present weights"),
            (draft, "the draft model"),
        ):
            if path and not Path(path).exists():
                return f"{name} {path} isn't on {self.host}: put it there, under the same path"
        return None

    async def _pass_on(self, link: RemoteLink, worker: WorkerProcess, start: wire.Start) -> None:
        """Pass messages on until the worker process is lost; it never returns.

        Raises:
            WorkerLost: The process was lost.
            _Refused: The engine refused the worker.
        """
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_raise_exit, worker)
                await worker.greet()
                await worker.link.send(start)
                to_worker, to_engine = worker.link.socket.send, link.send_bytes
                nursery.start_soon(_copy, link.receive_bytes, to_worker, _decoded_if_refusal)
                nursery.start_soon(_copy, worker.link.socket.receive, to_engine, self._note)
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        assert failure is not None
        if isinstance(failure, SocketFailed | EngineError):
            raise WorkerLost(f"{worker.name}: {failure}") from failure
        raise failure

    def _note(self, data: bytes) -> None:
        """Note a result of the worker: this attempt hasn't failed."""
        if wire.has_tag(data, wire.StepResult):
            self._attempts = 0


async def _copy(
    receive: Callable[[], Awaitable[bytes]],
    send: Callable[[bytes], Awaitable[None]],
    look_at: Callable[[bytes], object],
) -> None:
    """Pass messages on until cancelled; ``look_at`` gets each first."""
    while True:
        data = await receive()
        look_at(data)
        await send(data)


def _decoded(data: bytes) -> wire.Message:
    """Return a message of the engine.

    Raises:
        WorkerLost: It is invalid.
        _Refused: It is a refusal.
    """
    try:
        message = wire.decode(data)
    except wire.WireError as error:
        raise WorkerLost(f"the engine sent an invalid message: {error}") from error
    if isinstance(message, JoinRefusal):
        raise _Refused(message)
    return message


def _decoded_if_refusal(data: bytes) -> None:
    """Raise the refusal that ``data`` may be; all other messages are for the worker process."""
    if wire.has_tag(data, JoinRefusal):
        _decoded(data)


async def _raise_exit(worker: WorkerProcess) -> None:
    raise await worker.wait_lost()


async def _end_when(lost: trio.Event, link: RemoteLink) -> None:
    await lost.wait()
    link.end("the connection to the engine was closed")


async def _raise_loss(link: RemoteLink) -> None:
    loss = await link.wait_lost()
    raise WorkerLost(f"the engine was lost: {loss}")


async def _tell_end(link: RemoteLink, loss: WorkerLost) -> None:
    """Tell the engine how the worker process has ended, and let it close the link."""
    with trio.move_on_after(LEAVE_GRACE):
        await link.send(WorkerEnd(reason=str(loss), from_outside=loss.from_outside))
        await link.ended.wait()
