"""What a front end's HTTP tells of the whole server: it asks the engine process, which asks all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import attrs
import msgspec
import trio

from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.engine.sessions.continuation import Continuation, Generate
from trioserve.front_ends.client.scheduler import RemoteScheduler
from trioserve.front_ends.client.turns import RemoteTurns
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.messages import LeaveSeat, LeaveWatch
from trioserve.front_ends.server.engine_server import Collected
from trioserve.front_ends.server.session import Counted, Looked
from trioserve.http.api.auth import Caller, Keys
from trioserve.http.api.server_api import Pictures, Seat
from trioserve.observability.health import health_word
from trioserve.observability.live import Snapshot
from trioserve.observability.live.schema import TaskNode
from trioserve.observability.live.tasks import task_tree
from trioserve.observability.metrics.snapshot import filled, snapshot_of
from trioserve.observability.statistics import EngineStatistics
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration

HEALTH_SECONDS = 5.0
"""For the engine process to say how it is; one that doesn't is stalled."""


@attrs.define(eq=False)
class RemoteServer:
    """A server of several processes, as :class:`~trioserve.http.api.server_api.Whole` describes it.

    Args:
        engine: this process's.
        remote: what it has its requests computed by.
        index: the place of this process among all front ends.
    """

    _engine: Engine
    _remote: RemoteScheduler
    _index: int = 0
    _num_watches: int = attrs.field(default=0, init=False)
    _num_seats: int = attrs.field(default=0, init=False)
    _turns: RemoteTurns = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._turns = RemoteTurns(self._engine, self._remote)
        self._remote.on_turn_closed = self._turns.on_closed

    async def health_word(self) -> str:
        """How the server is: ``ok``, ``draining``, ``no_worker`` or ``stalled``."""
        with trio.move_on_after(HEALTH_SECONDS) as patience:
            try:
                await self._remote.look()
            except EngineError:
                return "no_worker"
        return "stalled" if patience.cancelled_caught else health_word(self._engine)

    async def statistics(self) -> EngineStatistics:
        """Counts of this moment, of all processes."""
        return (await self._collect()).statistics

    async def metrics(self) -> bytes:
        """Everything in Prometheus' text format: the sums over all processes."""
        collected = await self._collect()
        own = self._engine.metrics
        metrics = filled(collected.snapshot, model_name=own.model_name, prefix=own.prefix)
        metrics.watch(
            _Told(
                config=self._engine.config,
                ready=self._engine.ready,
                told=collected.statistics,
            )
        )
        return metrics.render()

    async def _collect(self) -> Collected:
        return msgspec.convert(await self._remote.rpc.ask("collect"), Collected)

    async def permit(self, keys: Keys, caller: Caller | None) -> Seat:
        """A block in which a request of ``caller`` is open, one of those in all processes.

        Raises:
            KeyLimit: as many as may be are open already.
        """
        if caller is None or not keys.limits(caller):
            return contextlib.nullcontext()
        self._num_seats += 1
        number = self._num_seats
        try:
            granted = await self._remote.rpc.ask("take_seat", [number, caller.name])
        except BaseException:
            # It may have been granted meanwhile.
            self._remote.tell(LeaveSeat(number))
            raise
        if not granted:
            raise keys.refusal()
        return self._seated(number)

    @contextlib.contextmanager
    def _seated(self, number: int) -> Iterator[None]:
        try:
            yield
        finally:
            self._remote.tell(LeaveSeat(number))

    async def pause(self, mode: str, *, refuse: bool) -> None:
        """As :meth:`trioserve.Engine.pause`, for the requests of all processes."""
        await self._remote.rpc.ask("pause", [mode, refuse])

    async def resume(self) -> None:
        """As :meth:`trioserve.Engine.resume`."""
        await self._remote.rpc.ask("resume")

    async def paused(self) -> bool:
        """As :attr:`trioserve.Engine.paused`."""
        await self._remote.look()
        return self._remote.paused

    async def memory_released(self) -> bool:
        """As :attr:`trioserve.Engine.memory_released`."""
        await self._remote.look()
        return self._remote.state.memory_released

    async def abort(self, ids: Iterable[str], *, prefix: bool) -> int:
        """:meth:`trioserve.Engine.abort` for each of ``ids``, in all processes."""
        num_aborted: int = await self._remote.rpc.ask("abort", [list(ids), prefix])
        return num_aborted

    async def flush_cache(self) -> int:
        """As :meth:`trioserve.Engine.flush_cache`."""
        num_pages: int = await self._remote.rpc.ask("flush_cache")
        return num_pages

    async def update_weights(self, model: str, mode: str, version: str | None) -> str:
        """As :meth:`trioserve.Engine.update_weights`; what they are called then."""
        called: str = await self._remote.rpc.ask("update_weights", [model, mode, version])
        return called

    async def weight_version(self) -> str:
        """As :attr:`trioserve.Engine.weight_version`."""
        version: str = await self._remote.rpc.ask("weight_version")
        return version

    async def call_weights(self, version: str) -> None:
        """Call the weights that serve something else."""
        await self._remote.rpc.ask("call_weights", version)

    async def release_memory(self) -> None:
        """As :meth:`trioserve.Engine.release_memory`."""
        await self._remote.rpc.ask("release_memory")

    async def resume_memory(self) -> None:
        """As :meth:`trioserve.Engine.resume_memory`."""
        await self._remote.rpc.ask("resume_memory")

    async def cache_events(self) -> list[CacheEvent]:
        """The prefix cache's events since this was asked last, by whatever process."""
        return msgspec.convert(await self._remote.rpc.ask("cache_events"), list[CacheEvent])

    async def iterations(self) -> list[Iteration]:
        """The steps since this was asked last, by whatever process; the first time none."""
        told = msgspec.convert(await self._remote.rpc.ask("iterations"), list[Iteration])
        clock = SharedClock.now()
        return [msgspec.structs.replace(each, time=clock.own(each.time)) for each in told]

    @contextlib.asynccontextmanager
    async def watch(self, *, requests: int, nodes: int) -> AsyncIterator[Pictures]:
        """As ``Monitor.watched``, of the engine process and all front ends."""
        self._num_watches += 1
        number = self._num_watches

        async def take() -> Snapshot:
            snapshot = msgspec.convert(await self._remote.rpc.ask("picture", number), Snapshot)
            if snapshot.health == "ok" and self._engine.draining:
                return msgspec.structs.replace(snapshot, health="draining")
            return snapshot

        try:
            await self._remote.rpc.ask("watch", [number, requests, nodes])
            yield take
        finally:
            # It may have begun, whatever this was told.
            self._remote.tell(LeaveWatch(number))

    async def open_session(
        self,
        id: str | None,
        *,
        capacity: int,
        timeout: float,
        owner: str | None,
        tenant: str,
        goes_on: bool,
    ) -> str:
        """As :meth:`trioserve.engine.sessions.sessions.Sessions.open`; the id of the session."""
        arguments = [id, capacity, timeout, owner, tenant, goes_on]
        opened: str = await self._remote.rpc.ask("open_session", arguments)
        return opened

    async def close_session(self, id: str, owner: str | None) -> None:
        """Close a session of ``owner``; raises ``InvalidRequest`` if there is none of that id."""
        await self._remote.rpc.ask("close_session", [id, owner])

    def turn(self, id: str, owner: str | None, continuation: Continuation) -> Generate:
        """What generates a turn of a session of ``owner``, if there is one when it is used."""
        return functools.partial(self._turns.generate, id, owner, continuation)

    async def keep_response(
        self, owner: str | None, id: str, data: bytes, previous: str | None
    ) -> bool:
        """Keep a response for all processes, as ``KeptResponses.keep``."""
        kept: bool = await self._remote.rpc.ask("keep_response", [owner, id, data, previous])
        return kept

    async def kept_conversation(self, owner: str | None, id: str) -> list[bytes]:
        """As :meth:`trioserve.http.api.openai.responses.store.KeptResponses.conversation`."""
        turns: list[bytes] = await self._remote.rpc.ask("kept_conversation", [owner, id])
        return turns

    async def drop_response(self, owner: str | None, id: str) -> bool:
        """As :meth:`trioserve.http.api.openai.responses.store.KeptResponses.drop`."""
        dropped: bool = await self._remote.rpc.ask("drop_response", [owner, id])
        return dropped

    # ---- what the engine process asks

    async def count(self, _: Any) -> Counted:
        """What this process has counted, and how much is going on in it."""
        statistics = self._engine.statistics()
        return Counted(
            snapshot=snapshot_of(self._engine.metrics),
            num_tokenizing=statistics.num_tokenizing,
            num_streams=statistics.num_streams,
            stream_bytes=statistics.stream_bytes,
        )

    async def look(self, _: Any) -> Looked:
        """The same, and what the tasks of this process are."""
        tree = TaskNode(name=f"front end {self._index}", state="", children=[task_tree()])
        return Looked(await self.count(None), tree)

    async def abort_own(self, arguments: Any) -> int:
        """End those of this process's requests that are named so; how many were ended."""
        ids, prefix = arguments
        return sum(self._engine.abort(id, prefix=prefix) for id in ids)


@attrs.frozen(kw_only=True)
class _Told:
    """The engine of a whole server, as metrics read it."""

    config: EngineConfig
    ready: wire.Ready
    _told: EngineStatistics

    def statistics(self) -> EngineStatistics:
        return self._told
