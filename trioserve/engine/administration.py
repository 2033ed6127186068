"""The administration of an engine, wherever its scheduler runs.

In a process of one's own it is :class:`trioserve.engine.local_administration.LocalAdministration`.
A front end asks the engine process (:class:`trioserve.front_ends.client.server_api.RemoteServer`).
"""

from __future__ import annotations

from typing import Protocol

from trioserve.observability.statistics import EngineStatistics
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol.joining import WorkerRole
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration


class Administration(Protocol):
    """The calls of operators: pauses, weights, memory, adapters, sessions, events, statistics."""

    async def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""

    async def pause(self, mode: str, refuse: bool) -> None:
        """Pause as :meth:`trioserve.Engine.pause`."""

    async def resume(self) -> None:
        """Resume as :meth:`trioserve.Engine.resume`."""

    async def paused(self) -> bool:
        """Return :attr:`trioserve.Engine.paused`."""

    async def memory_released(self) -> bool:
        """Return :attr:`trioserve.Engine.memory_released`."""

    async def abort(self, ids: list[str], prefix: bool) -> int:
        """Abort each of ``ids`` as :meth:`trioserve.Engine.abort`; return how many were ended."""

    async def flush_cache(self) -> int:
        """Flush the prefix cache as :meth:`trioserve.Engine.flush_cache`."""

    async def update_weights(self, model: str, mode: str, version: str | None) -> str:
        """Update as :meth:`trioserve.Engine.update_weights`; return the version then served."""

    async def weight_version(self) -> str:
        """Return :attr:`trioserve.Engine.weight_version`."""

    async def set_weights_version(self, version: str) -> None:
        """Name the version of the weights that are served."""

    async def release_memory(self) -> None:
        """Release memory as :meth:`trioserve.Engine.release_memory`."""

    async def resume_memory(self) -> None:
        """Take memory again as :meth:`trioserve.Engine.resume_memory`."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load as :meth:`trioserve.Engine.load_adapter`."""

    async def unload_adapter(self, name: str) -> None:
        """Unload as :meth:`trioserve.Engine.unload_adapter`."""

    async def iterations(self) -> list[Iteration]:
        """Return the newest steps since the last call. The first call returns none."""

    async def workers(self) -> list[WorkerReport]:
        """Return :attr:`trioserve.Engine.workers`."""

    async def add_worker(self, device: str | None, role: WorkerRole) -> WorkerReport:
        """Add a worker as :meth:`trioserve.Engine.add_worker`."""

    async def remove_worker(self, index: int) -> None:
        """Remove a worker as :meth:`trioserve.Engine.remove_worker`."""

    async def cache_events(self) -> list[CacheEvent]:
        """Return the prefix cache's newest events since the last call."""

    async def open_session(
        self,
        id: str | None,
        capacity: int,
        timeout: float,
        owner: str | None,
        tenant: str,
        goes_on: bool,
    ) -> str:
        """Open a session as :meth:`trioserve.engine.sessions.sessions.Sessions.open`.

        Returns:
            the session's id.
        """

    async def close_session(self, id: str, owner: str | None) -> None:
        """Close a session of ``owner``; raise ``InvalidRequest`` if there is none of that id."""
