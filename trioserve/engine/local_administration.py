"""The administration of an engine in the process that has its schedulers."""

from __future__ import annotations

from typing import Protocol

import attrs

from trioserve._util.feed import Tail
from trioserve.engine.control import Control
from trioserve.engine.engine import Engine
from trioserve.engine.schedulers import Schedulers
from trioserve.engine.sessions.sessions import Sessions
from trioserve.engine.worker_group import WorkerGroup
from trioserve.observability.statistics import EngineStatistics
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol.joining import WorkerRole
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration


class AdministeredEngine(Protocol):
    """The parts of an engine that operators' calls need."""

    @property
    def control(self) -> Control: ...

    @property
    def schedulers(self) -> Schedulers: ...

    @property
    def sessions(self) -> Sessions: ...

    def statistics(self) -> EngineStatistics: ...

    @property
    def worker_group(self) -> WorkerGroup: ...


@attrs.define(eq=False)
class SharedAdministration:
    """The calls of operators that are answered alike for one process and for several.

    Args:
        engine: an :class:`~trioserve.engine.engine.Engine`, or the engine process's part of a
            server with front ends.
    """

    _engine: AdministeredEngine
    _iterations: Tail[Iteration] = attrs.field(init=False)
    _cache_events: Tail[CacheEvent] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._iterations = Tail(lambda: self._engine.schedulers.iterations())
        self._cache_events = Tail(lambda: self._engine.schedulers.cache_events())

    async def statistics(self) -> EngineStatistics:
        """Return the current counts."""
        return self._engine.statistics()

    async def pause(self, mode: str, refuse: bool) -> None:
        """Pause as :meth:`trioserve.Engine.pause`."""
        await self._engine.control.pause(mode, refuse=refuse)

    async def resume(self) -> None:
        """Resume as :meth:`trioserve.Engine.resume`."""
        self._engine.control.resume()

    async def paused(self) -> bool:
        """Return :attr:`trioserve.Engine.paused`."""
        return self._engine.schedulers.paused

    async def memory_released(self) -> bool:
        """Return :attr:`trioserve.Engine.memory_released`."""
        return self._engine.control.memory_released

    async def flush_cache(self) -> int:
        """Flush the cache as :meth:`trioserve.Engine.flush_cache`."""
        return self._engine.control.flush_cache()

    async def update_weights(self, model: str, mode: str, version: str | None) -> str:
        """Update as :meth:`trioserve.Engine.update_weights`; return the new version's name."""
        await self._engine.control.update_weights(model, mode, version)
        return self._engine.control.weight_version

    async def weight_version(self) -> str:
        """Return :attr:`trioserve.Engine.weight_version`."""
        return self._engine.control.weight_version

    async def set_weights_version(self, version: str) -> None:
        """Give the current weights another version name."""
        self._engine.control.weight_version = version

    async def release_memory(self) -> None:
        """Release memory as :meth:`trioserve.Engine.release_memory`."""
        await self._engine.control.release_memory()

    async def resume_memory(self) -> None:
        """Resume as :meth:`trioserve.Engine.resume_memory`."""
        await self._engine.control.resume_memory()

    async def unload_adapter(self, name: str) -> None:
        """Unload as :meth:`trioserve.Engine.unload_adapter`."""
        await self._engine.schedulers.adapters.unload(name)

    async def iterations(self) -> list[Iteration]:
        """Return the newest steps since the last call; the first returns none."""
        return self._iterations.take()

    async def workers(self) -> list[WorkerReport]:
        """Return :attr:`trioserve.Engine.workers`."""
        return self._engine.worker_group.reports()

    async def add_worker(self, device: str | None, role: WorkerRole) -> WorkerReport:
        """Add a worker as :meth:`trioserve.Engine.add_worker`."""
        return await self._engine.worker_group.add(device, role)

    async def remove_worker(self, index: int) -> None:
        """Remove a worker as :meth:`trioserve.Engine.remove_worker`."""
        await self._engine.worker_group.remove(index)

    async def cache_events(self) -> list[CacheEvent]:
        """Return the prefix cache's newest events since the last call; the first returns none."""
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
        """Open a session as :meth:`trioserve.engine.sessions.sessions.Sessions.open`; return its
        id.
        """
        session = self._engine.sessions.open(
            id, capacity=capacity, timeout=timeout, owner=owner, tenant=tenant, goes_on=goes_on
        )
        return session.id

    async def close_session(self, id: str, owner: str | None) -> None:
        """Close a session of ``owner``; raise ``InvalidRequest`` if there is none of that id."""
        self._engine.sessions.find(id, owner).close()


@attrs.define(eq=False)
class LocalAdministration(SharedAdministration):
    """The calls of operators to an engine that is one process."""

    _engine: Engine

    async def abort(self, ids: list[str], prefix: bool) -> int:
        """Call :meth:`trioserve.Engine.abort` for each of ``ids``; return how many were ended."""
        return sum(self._engine.abort(id, prefix=prefix) for id in ids)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load as :meth:`trioserve.Engine.load_adapter`."""
        await self._engine.load_adapter(name, path)
