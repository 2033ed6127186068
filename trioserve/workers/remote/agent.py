"""``trioserve worker``: the agent that serves an engine on another host with a worker process.

The agent joins, starts a worker process when the engine tells what to load, and passes messages on.
It answers heartbeats itself, because a worker that computes a step can't. When the link or the
worker process is lost, the agent ends the other one, so nothing of the engine's state remains, and
joins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import SocketFailed
from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.certificates import Credentials
from trioserve.protocol.devices import split_device
from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.protocol.joining import Join, Role, WorkerEnd, WorkerRole
from trioserve.workers.process import WorkerProcess, open_process
from trioserve.workers.remote.joiner import Joiner, raise_refusal
from trioserve.workers.remote.link import RemoteLink

LEAVE_GRACE = 2.0
"""Seconds for the engine to close the link of an agent that leaves."""

_log = get_logger("trioserve.worker")


@attrs.define(eq=False, kw_only=True)
class Agent(Joiner):
    """The agent of one worker.

    Args:
        device: Device in place of the engine's choice, if given.
        num_threads: Threads in place of the engine's choice, if given.
        computes: The part of each request that the worker computes.
        num_nodes: Number of hosts that have its ranks; this is the first.
        nodes_listen: Address and port at which the others join.
        nodes_tls: Certificates for that.
    """

    device: str | None = None
    num_threads: int | None = None
    computes: WorkerRole = "both"
    num_nodes: int = 1
    nodes_listen: str = ""
    nodes_tls: Credentials | None = None

    @property
    def role(self) -> Role:
        """Its part in the server."""
        return "worker"

    def join_message(self) -> Join:
        """Return the first message, with the worker's role."""
        return attrs.evolve(super().join_message(), computes=self.computes)

    async def serve(self, link: RemoteLink, nursery: trio.Nursery) -> None:
        """Serve the engine until the link or the worker process is lost.

        Raises:
            WorkerLost: The link or the process was lost.
            JoinRefused: The engine refused the worker.
        """
        nursery.start_soon(self._tell_leaving, link)
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

    async def _tell_leaving(self, link: RemoteLink) -> None:
        await self._leaving.wait()
        with trio.move_on_after(LEAVE_GRACE):
            reason = f"its agent at {self.host} ends"
            await link.send(WorkerEnd(reason=reason, from_outside=True, leaves=True))
            await link.ended.wait()
        link.end("the agent ends")

    def _for_this_host(self, start: wire.Start) -> wire.Start:
        """Return ``start`` with what is this host's own."""
        device, cores = split_device(self.device or start.device)
        return attrs.evolve(
            start,
            model=self.model,
            device=device,
            cores=cores,
            num_threads=self.num_threads or start.num_threads,
            num_nodes=self.num_nodes,
            nodes_listen=self.nodes_listen,
            nodes_tls=self.nodes_tls,
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
            JoinRefused: The engine refused the worker.
        """
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_raise_exit, worker)
                await worker.greet()
                await worker.link.send(start)
                to_worker, to_engine = worker.link.socket.send, link.send_bytes
                nursery.start_soon(_copy, link.receive_bytes, to_worker, raise_refusal)
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
        JoinRefused: It is a refusal.
    """
    raise_refusal(data)
    try:
        return wire.decode(data)
    except wire.WireError as error:
        raise WorkerLost(f"the engine sent an invalid message: {error}") from error


async def _raise_exit(worker: WorkerProcess) -> None:
    raise await worker.wait_lost()


async def _tell_end(link: RemoteLink, loss: WorkerLost) -> None:
    """Tell the engine how the worker process has ended, and let it close the link."""
    with trio.move_on_after(LEAVE_GRACE):
        await link.send(WorkerEnd(reason=str(loss), from_outside=loss.from_outside))
        await link.ended.wait()
