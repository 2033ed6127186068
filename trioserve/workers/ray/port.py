"""The engine's port for the workers that Ray starts, and the process that starts them."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from trioserve._util.child_process import end_child
from trioserve._util.exception_groups import sole_exception
from trioserve.config import EngineConfig
from trioserve.observability.logs import get_logger
from trioserve.protocol.certificates import Credentials
from trioserve.protocol.errors import CallFailed, EngineError, InvalidRequest, TrioserveError
from trioserve.workers.command import package_environment
from trioserve.workers.process import describe_exit
from trioserve.workers.ray.messages import (
    ActorEnded,
    AgentSetup,
    NoRoomYet,
    PlaceActors,
    RayCommand,
    RayConnected,
    RayEvent,
    RayFailed,
    StopActor,
    to_line,
)
from trioserve.workers.remote.certificates import new_credentials
from trioserve.workers.remote.port import WorkersPort
from trioserve.workers.remote.tls import engine_tls_of
from trioserve.workers.supervisor import delay_after

CONNECT_TIMEOUT = 120.0
"""Seconds for the process to connect to a cluster, or to start one."""
END_GRACE = 20.0
"""Seconds for the process to remove actors and to end a cluster that it has started."""
FIRST_DELAY = 1.0
MAX_DELAY = 30.0
"""Most seconds between two attempts to connect to a cluster that was lost."""
ANY_ADDRESS = ("0.0.0.0", "[::]")

_decoder = msgspec.json.Decoder(RayEvent)
_log = get_logger("trioserve.worker")


@attrs.define(eq=False, kw_only=True)
class RayPort(WorkersPort):
    """The port, and the workers that Ray starts for it.

    An empty :attr:`address` stands for one that the nodes of the cluster reach.

    Args:
        template: What each worker's first actor is told, without its name and the port's address.
        node_tls: Certificates with which nodes join node 0, if workers have several.
        count: Number of workers that start with the engine.
        place_timeout: Seconds for Ray to have room for workers.
        num_gpus: GPUs of each worker, if workers have GPUs.
    """

    template: AgentSetup = attrs.field(repr=False)
    node_tls: Credentials | None = attrs.field(repr=False)
    count: int
    place_timeout: float
    num_gpus: int
    _wanted: list[str] = attrs.field(init=False)
    """Names of the agents that have an actor, or are to have one."""
    _ends: dict[str, str] = attrs.field(init=False, factory=dict)
    """Why agents ended that have never served; :meth:`start_worker` waits for them."""
    is_complete: bool = attrs.field(init=False, default=False)
    """True once the workers serve that start with the engine."""
    _process: trio.Process | None = attrs.field(init=False, default=None)
    _sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    @_wanted.default
    def _name_first(self) -> list[str]:
        return [secrets.token_hex(16) for _ in range(self.count)]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the actors, and accept their workers, until cancelled.

        ``task_status`` is told when it listens.

        Raises:
            TrioserveError: The address can't be used.
            EngineError: Ray can't be used, or has no room, before :attr:`is_complete`.
        """
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                await self._keep_process(nursery, task_status)
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        assert failure is not None
        raise failure

    async def wait_complete(self) -> None:
        """Block until all workers serve that start with the engine."""
        _log.info("waiting for the workers of Ray", workers=self.count)
        await self.workers.joins.wait_for(lambda: self.workers.num_serving >= self.count)
        self.is_complete = True

    async def start_worker(self, device: str | None) -> int:
        """Start one more worker, and return its number once it serves.

        Raises:
            InvalidRequest: ``device`` is given.
            CallFailed: Its actor has ended, or Ray has no room for it.
        """
        if device is not None:
            raise InvalidRequest("Ray gives each worker its device", param="device")
        name = secrets.token_hex(16)
        self._wanted.append(name)
        try:
            await self._send(self._place([name], self.place_timeout))
            await self.workers.joins.wait_for(
                lambda: self.workers.index_of(name) is not None or name in self._ends
            )
            if name in self._ends:
                raise CallFailed("no worker could be added", self._ends.pop(name))
        finally:
            if self.workers.index_of(name) is None and name in self._wanted:  # It was cancelled.
                self._wanted.remove(name)
                with trio.CancelScope(shield=True):
                    await self._send(StopActor(id=name))
        index = self.workers.index_of(name)
        assert index is not None
        return index

    # ---- the process

    async def _keep_process(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]
    ) -> None:
        """Run the process, and the next one if it is lost. The port is a task of ``nursery``."""
        attempts = 0
        while True:
            reason = await self._run_process(nursery, task_status)
            if not self.is_complete:
                raise EngineError(f"Ray can't be used: {reason}")
            attempts += 1
            _log.error("Ray was lost", reason=reason, attempts=attempts)
            await trio.sleep(delay_after(attempts, FIRST_DELAY, MAX_DELAY))

    async def _run_process(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> str:
        """Run the process until it ends; return why."""
        async with _open_process() as process:
            self._process = process
            assert process.stdout is not None
            try:
                with trio.move_on_after(CONNECT_TIMEOUT) as connecting:
                    async for event in _events_of(process.stdout):
                        if isinstance(event, RayFailed):
                            return event.reason
                        if isinstance(event, RayConnected):
                            connecting.deadline = math.inf
                            await self._on_connected(event.host, nursery, task_status)
                        else:
                            self._take(event)
            finally:
                self._process = None
            if connecting.cancelled_caught:
                return f"no cluster answered within {CONNECT_TIMEOUT:g} s (RAY_ADDRESS)"
            return f"its process {describe_exit(await process.wait())}"

    async def _on_connected(
        self, host: str, nursery: trio.Nursery, task_status: trio.TaskStatus[None]
    ) -> None:
        """Listen, if this is the first time, and have the actors placed."""
        if not self.bound:
            self.address = self.address or f"{host}:0"
            await nursery.start(super().run)
            listening, _, port = self.bound.rpartition(":")
            engine = f"{host}:{port}" if listening in ANY_ADDRESS else self.bound
            self.template = msgspec.structs.replace(self.template, join=engine)
            task_status.started()
        if self.is_complete:
            for name in self._wanted:
                await self._send(self._place([name], None))
        else:
            await self._send(self._place(self._wanted, self.place_timeout))

    def _place(self, names: list[str], timeout: float | None) -> PlaceActors:
        setups = [msgspec.structs.replace(self.template, id=name) for name in names]
        return PlaceActors(
            setups=setups,
            node_tls=self.node_tls,
            num_sharing=self.count,
            timeout=timeout,
            num_gpus=self.num_gpus,
        )

    async def _send(self, command: RayCommand) -> None:
        """Tell the process a command. If it is lost, the next one is told all that is wanted."""
        async with self._sending:
            if self._process is None:
                return
            assert self._process.stdin is not None
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._process.stdin.send_all(to_line(command))

    def _take(self, event: NoRoomYet | ActorEnded) -> None:
        if isinstance(event, NoRoomYet):
            _log.warning("waiting for room", reason=event.reason)
            return
        if not self.is_complete:
            raise EngineError(event.reason)
        if event.id in self._wanted:
            _log.warning("worker of Ray ended", reason=event.reason)
            self._wanted.remove(event.id)
            if self.workers.index_of(event.id) is None:
                self._ends[event.id] = event.reason
            self.workers.joins.notify()


async def _events_of(stream: trio.abc.ReceiveStream) -> AsyncIterator[RayEvent]:
    """Yield the events that the process sends."""
    pending = b""
    while data := await stream.receive_some():
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield _decoder.decode(line)


@contextlib.asynccontextmanager
async def _open_process() -> AsyncIterator[trio.Process]:
    """Run the process for the block; at its end no actor is left."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", "trioserve.workers.ray.driver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"RAY_USAGE_STATS_ENABLED": "0", **package_environment()},
        # Ctrl-C in the terminal must reach only the parent, which ends it in order.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(END_GRACE):
                await process.wait()
            await end_child(process, _log, "the process for Ray")
            await process.stdout.aclose()


def ray_port(config: EngineConfig, fields: dict[str, Any]) -> RayPort:
    """Return the port, with certificates that are made for it. ``fields`` are the common ones.

    Raises:
        TrioserveError: The extra ``ray`` is missing, or the address is one for Ray Client.
    """
    if importlib.util.find_spec("ray") is None:
        raise TrioserveError("--distributed-executor-backend ray: install trioserve[ray]")
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise TrioserveError(
            "RAY_ADDRESS is one for Ray Client: run the server on a node, and give the address of "
            "the cluster's head, as HOST:PORT"
        )
    engine, worker = new_credentials()
    # Nodes have an authority of their own, so the engine's key stays in this process.
    node_0, node = new_credentials() if config.nnodes > 1 else (None, None)
    model = Path(config.model)
    template = AgentSetup(
        id="",
        join="",
        tls=worker,
        # An actor has another working folder.
        model=str(model.resolve()) if model.exists() else config.model,
        revision=config.revision,
        device=config.device,
        num_threads=config.num_threads,
        num_nodes=config.nnodes,
        nodes_tls=node_0,
    )
    return RayPort(
        tls=engine_tls_of(engine),
        template=template,
        node_tls=node,
        count=config.data_parallel_size,
        place_timeout=config.worker_start_timeout,
        num_gpus=config.num_ranks,
        **fields,
    )
