"""The whole server for a front end's HTTP: it asks the engine process, which asks all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator

import attrs
import msgspec
import trio

from trioserve.config import EngineConfig
from trioserve.config.adapter_paths import absolute
from trioserve.engine.cache_feed import CacheChanges
from trioserve.engine.operations import check_adapter
from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.sessions.continuation import Continuation, Generate
from trioserve.front_ends.calls import AdministrationCalls, Collected, Counted, Looked
from trioserve.front_ends.client.scheduler import RemoteScheduler
from trioserve.front_ends.client.turns import RemoteTurns
from trioserve.front_ends.messages import EndSubscription, ReturnPermit
from trioserve.front_ends.rpc import RpcPeer
from trioserve.http.api.auth import Caller, Keys
from trioserve.http.api.server_api import Permit, TakeChanges, TakeSnapshot
from trioserve.observability.health import health_word
from trioserve.observability.live import Snapshot
from trioserve.observability.live.schema import TaskNode
from trioserve.observability.live.tasks import task_tree
from trioserve.observability.metrics.snapshot import filled, snapshot_of
from trioserve.observability.statistics import EngineStatistics
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
from trioserve.scheduler.iterations import Iteration

HEALTH_SECONDS = 5.0
"""Time for the engine process to report its state; one that doesn't is stalled."""


@attrs.define(eq=False)
class RemoteServer(AdministrationCalls):
    """A server of several processes: :class:`~trioserve.http.api.server_api.ServerApi`.

    Args:
        engine: this process's.
        remote: its back end.
        index: the place of this process among all front ends.
    """

    _engine: RequestEngine
    _remote: RemoteScheduler
    _index: int = 0
    _num_watches: int = attrs.field(default=0, init=False)
    _num_seats: int = attrs.field(default=0, init=False)
    _turns: RemoteTurns = attrs.field(init=False)
    rpc: RpcPeer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rpc = self._remote.rpc
        self._turns = RemoteTurns(self._engine, self._remote)
        self._remote.on_turn_closed = self._turns.on_closed

    async def health_word(self) -> str:
        """Return the server's health: ``ok``, ``draining``, ``no_worker`` or ``stalled``."""
        with trio.move_on_after(HEALTH_SECONDS) as patience:
            try:
                await self._remote.look()
            except EngineError:
                return "no_worker"
        return "stalled" if patience.cancelled_caught else health_word(self._engine)

    async def statistics(self) -> EngineStatistics:
        """Return the counts of this moment, of all processes."""
        return (await self._collect()).statistics

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format: the sums over all processes."""
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
        return await self._remote.calls.collect()

    async def permit(self, keys: Keys, caller: Caller | None) -> Permit:
        """Return a block in which a request of ``caller`` is open; all processes share the limit.

        Raises:
            KeyLimit: as many as may be are open already.
        """
        if caller is None or not keys.limits(caller):
            return contextlib.nullcontext()
        self._num_seats += 1
        number = self._num_seats
        try:
            granted = await self._remote.calls.take_permit(number, caller.name)
        except BaseException:
            # It may have been granted meanwhile.
            self._remote.tell(ReturnPermit(number))
            raise
        if not granted:
            raise keys.refusal()
        return self._seated(number)

    @contextlib.contextmanager
    def _seated(self, number: int) -> Iterator[None]:
        try:
            yield
        finally:
            self._remote.tell(ReturnPermit(number))

    async def paused(self) -> bool:
        """Return :attr:`trioserve.Engine.paused`."""
        await self._remote.look()
        return self._remote.paused

    async def memory_released(self) -> bool:
        """Return :attr:`trioserve.Engine.memory_released`."""
        await self._remote.look()
        return self._remote.state.memory_released

    async def load_adapter(self, name: str, path: str) -> None:
        """Load as :meth:`trioserve.Engine.load_adapter`."""
        check_adapter(name, self._engine.config, self._engine.model_name)
        await self._remote.calls.load_adapter(name, absolute(path))

    async def iterations(self) -> list[Iteration]:
        """Return the steps since the last call from any process. The first call returns none."""
        told = await self._remote.calls.iterations()
        own = self._remote.clock.own
        return [msgspec.structs.replace(each, time=own(each.time)) for each in told]

    @contextlib.asynccontextmanager
    async def watch(self, *, requests: int, nodes: int) -> AsyncIterator[TakeSnapshot]:
        """Open a subscription as ``Monitor.watched``, to the snapshots of all processes."""
        self._num_watches += 1
        number = self._num_watches

        async def take() -> Snapshot:
            snapshot = await self._remote.calls.take_snapshot(number)
            if snapshot.health == "ok" and self._engine.draining:
                return msgspec.structs.replace(snapshot, health="draining")
            return snapshot

        try:
            await self._remote.calls.watch(number, requests, nodes)
            yield take
        finally:
            # It may have begun even if the call failed.
            self._remote.tell(EndSubscription(number))

    @contextlib.asynccontextmanager
    async def read_cache(self) -> AsyncIterator[TakeChanges]:
        """Open a subscription as ``CacheFeed.reader``, to the caches in the engine process."""
        self._num_watches += 1
        number = self._num_watches

        async def take() -> CacheChanges:
            return await self._remote.calls.take_changes(number)

        try:
            await self._remote.calls.read_cache(number)
            yield take
        finally:
            self._remote.tell(EndSubscription(number))

    def turn(self, id: str, owner: str | None, continuation: Continuation) -> Generate:
        """Return a ``generate`` for a turn of a session, which is looked up when it is used."""
        return functools.partial(self._turns.generate, id, owner, continuation)

    # ---- what the engine process asks

    async def count(self) -> Counted:
        """Return the counts of this process, and how much is going on in it."""
        statistics = self._engine.statistics()
        return Counted(
            snapshot=snapshot_of(self._engine.metrics),
            num_tokenizing=statistics.num_tokenizing,
            num_streams=statistics.num_streams,
            stream_bytes=statistics.stream_bytes,
        )

    async def look(self) -> Looked:
        """Return the counts and the tasks of this process."""
        tree = TaskNode(name=f"front end {self._index}", state="", children=[task_tree()])
        return Looked(await self.count(), tree)

    async def abort_own(self, ids: list[str], prefix: bool) -> int:
        """Abort requests of this process by name; return how many were ended."""
        return sum(self._engine.abort(id, prefix=prefix) for id in ids)


@attrs.frozen(kw_only=True)
class _Told:
    """The engine of a whole server, for metrics."""

    config: EngineConfig
    ready: wire.Ready
    _told: EngineStatistics

    def statistics(self) -> EngineStatistics:
        return self._told
