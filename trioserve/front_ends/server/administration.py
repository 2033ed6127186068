"""The engine process's handlers of operators' calls, for all front ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from trioserve._util.feed import Tail
from trioserve.engine.control import Control
from trioserve.engine.sessions.sessions import Sessions
from trioserve.front_ends.calls import Collected, EngineState
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.server.peers import Peers
from trioserve.http.api.openai.responses.store import KeptResponses
from trioserve.observability.metrics.snapshot import MetricsSnapshot
from trioserve.observability.statistics import EngineStatistics
from trioserve.pooling.batcher import Batcher
from trioserve.pooling.columns import Columns
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration
from trioserve.scheduler.scheduler import Scheduler


@attrs.define(eq=False, kw_only=True)
class HostedAdministration:
    """The handlers of :class:`~trioserve.front_ends.calls.EngineCalls` for operators.

    Args:
        scheduler: computes all requests.
        control: pauses it, and the like.
        peers: all front ends.
        sessions: the open sessions of all front ends.
        clock: translates times for front ends.
        statistics: returns the counts of this moment.
        snapshot: returns the counts of all processes.
        check_pause: raises ``Paused`` during a pause that refuses requests.
        batcher: computes texts as a whole, if the model is an encoder.
    """

    _scheduler: Scheduler
    _control: Control
    _peers: Peers
    _sessions: Sessions
    _clock: SharedClock
    _statistics: Callable[[], EngineStatistics]
    _snapshot: Callable[[], MetricsSnapshot]
    _check_pause: Callable[[], None]
    _batcher: Batcher | None
    _responses: KeptResponses = attrs.field(init=False, factory=KeptResponses)
    _iterations: Tail[Iteration] = attrs.field(init=False)
    _cache_events: Tail[CacheEvent] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        feeds = self._scheduler.feeds
        self._iterations = Tail(feeds.iterations.feed.subscribe)
        self._cache_events = Tail(feeds.cache.feed.subscribe)

    async def call_worker(self, name: str, arguments: Any) -> Any:
        """Call the worker by name."""
        return await self._scheduler.call(name, arguments)

    async def encode(self, columns: Any, tenant: str) -> bytes:
        """Compute texts as a whole; return their vectors as a column of float32."""
        if self._batcher is None:
            raise InvalidRequest("the model is no encoder")
        self._check_pause()
        return wire.from_floats(await self._batcher.compute(Columns.from_message(columns), tenant))

    async def state(self) -> EngineState:
        """Return the state of the engine process."""
        statistics = self._statistics()
        return EngineState(
            attached=self._scheduler.attached,
            stalled=self._scheduler.stalled,
            paused=self._scheduler.paused,
            memory_released=self._control.memory_released,
            worker_restarts=statistics.worker_restarts,
            scheduler=statistics.scheduler,
        )

    async def collect(self) -> Collected:
        """Return the counts of all processes, after asking the front ends for theirs."""
        await self._peers.count()
        return Collected(snapshot=self._snapshot(), statistics=self._statistics())

    async def pause(self, mode: str, refuse: bool) -> None:
        """Pause as :meth:`trioserve.Engine.pause`."""
        await self._control.pause(mode, refuse=refuse)

    async def resume(self) -> None:
        """Resume as :meth:`trioserve.Engine.resume`."""
        self._control.resume()

    async def abort(self, ids: list[str], prefix: bool) -> int:
        """Abort requests by name; return how many were ended."""
        num_aborted = await self._peers.abort(ids, prefix)
        # A front end that didn't answer may have some left.
        return num_aborted + sum(self._control.abort(id, prefix=prefix) for id in ids)

    async def flush_cache(self) -> int:
        """Flush the prefix cache; return how many pages were freed."""
        return self._control.flush_cache()

    async def update_weights(self, model: str, mode: str, version: str | None) -> str:
        """Serve other weights; return their version."""
        await self._control.update_weights(model, mode, version)
        return self._control.weight_version

    async def weight_version(self) -> str:
        """Return the version of the weights that are served."""
        return self._control.weight_version

    async def set_weights_version(self, version: str) -> None:
        """Name the version of the weights that are served."""
        self._control.weight_version = version

    async def release_memory(self) -> None:
        """End the worker, and so give back its memory."""
        await self._control.release_memory()

    async def resume_memory(self) -> None:
        """Start a worker again, and wait until it has loaded the model."""
        await self._control.resume_memory()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. Its name and path have been checked."""
        await self._scheduler.adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter once no request uses it."""
        await self._scheduler.adapters.unload(name)

    async def iterations(self) -> list[Iteration]:
        """Return the newest steps since the last call, with times as in messages."""
        return [
            msgspec.structs.replace(each, time=self._clock.shared(each.time))
            for each in self._iterations.take()
        ]

    async def cache_events(self) -> list[CacheEvent]:
        """Return the prefix cache's newest events since the last call."""
        return self._cache_events.take()

    async def open_session(
        self,
        id: str | None,
        capacity: int,
        timeout: float,
        owner: str | None,
        tenant: str,
        goes_on: bool,
    ) -> str:
        """Open a session; return its id."""
        session = self._sessions.open(
            id, capacity=capacity, timeout=timeout, owner=owner, tenant=tenant, goes_on=goes_on
        )
        return session.id

    async def close_session(self, id: str, owner: str | None) -> None:
        """Close a session of ``owner``."""
        self._sessions.find(id, owner).close()

    async def keep_response(
        self, owner: str | None, id: str, data: bytes, previous: str | None
    ) -> bool:
        """Keep a response as ``KeptResponses.keep``."""
        return self._responses.keep(owner, id, data, previous)

    async def kept_conversation(self, owner: str | None, id: str) -> list[bytes]:
        """Return a conversation as ``KeptResponses.conversation``."""
        return self._responses.conversation(owner, id)

    async def drop_response(self, owner: str | None, id: str) -> bool:
        """Drop a response as ``KeptResponses.drop``."""
        return self._responses.drop(owner, id)
