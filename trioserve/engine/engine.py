"""The engine of a process of its own: requests, sessions and operators' calls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import attrs

from trioserve.engine.control import Control
from trioserve.engine.operations import OperatedEngine
from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.schedulers import Schedulers
from trioserve.engine.sessions.session import MAX_CAPACITY, Session
from trioserve.engine.sessions.sessions import Sessions
from trioserve.engine.worker_group import WorkerGroup
from trioserve.observability.statistics import EngineStatistics
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol.errors import EngineError, Paused
from trioserve.protocol.joining import WorkerRole
from trioserve.workers.supervisor import WorkerLife


@attrs.define(eq=False, kw_only=True)
class Engine(RequestEngine, OperatedEngine):
    """A running engine. Made by :func:`open_engine`; every method is for the same trio program."""

    _backend: Schedulers
    worker_group: WorkerGroup
    """The workers."""
    sessions: Sessions = attrs.field(init=False)
    """The open sessions."""
    control: Control = attrs.field(init=False)
    """The implementation of operators' calls."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.control = Control(self.schedulers, self._open)
        self.sessions = Sessions(
            self.schedulers.pins, self.config.max_sessions, self.generate, self.end
        )

    @property
    def schedulers(self) -> Schedulers:
        """The schedulers of the engine."""
        return self._backend

    @property
    def workers(self) -> list[WorkerReport]:
        """The states of the workers at this moment."""
        return self.worker_group.reports()

    def worker_life(self) -> WorkerLife:
        """Return the state of the first worker process that doesn't run, or of the first one."""
        return self.worker_group.life

    async def add_worker(
        self, device: str | None = None, role: WorkerRole = "both"
    ) -> WorkerReport:
        """Start one more worker on this host; return its state once it serves.

        Args:
            device: its device, as in ``worker_devices``; by default the first one that no other
                worker has.
            role: the part of each request that it computes, as in ``disaggregation``.

        Raises:
            InvalidRequest: nothing is computed now, there is no device for it, pages can't be
                handed over as the role needs, or the model is an encoder.
            CallFailed: it can't load the model.
        """
        return await self.worker_group.add(device, role)

    async def remove_worker(self, index: int) -> None:
        """End the worker of that number, once all of its requests have gone to others.

        Raises:
            InvalidRequest: there is no such worker, or no other one.
        """
        await self.worker_group.remove(index)

    @contextlib.contextmanager
    def open_session(
        self,
        session_id: str | None = None,
        *,
        capacity: int = MAX_CAPACITY,
        timeout: float = math.inf,
    ) -> Iterator[Session]:
        """Open a conversation that is remembered: ``with engine.open_session() as session``.

        Leaving the block forgets it, and ends the turns that still run.

        Args:
            session_id: a name for it (default: a random one).
            capacity: tokens that its history may hold before it takes no more turns.
            timeout: seconds without a turn after which it is closed.

        Raises:
            InvalidRequest: an argument is wrong, or there is a session of that id.
            SessionLimit: as many sessions are open as may be (``max_sessions``).
            EngineError: the engine is closed.
        """
        session = self.sessions.open(session_id, capacity=capacity, timeout=timeout)
        try:
            yield session
        finally:
            session.close()

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""
        return attrs.evolve(
            super().statistics(),
            num_sessions=len(self.sessions),
            memory_released=self.control.memory_released,
            workers=tuple(self.workers),
        )

    def check_integrity(self) -> None:
        """Assert the invariants of the scheduler, the page pool, the streams and the sessions.

        Raises:
            AssertionError: one is violated; this is a bug in trioserve.
        """
        super().check_integrity()
        self.sessions.check_integrity()

    def close(self, error: EngineError) -> None:
        """End every open request with ``error``, and refuse new ones with it. Idempotent."""
        super().close(error)
        for each in self.schedulers:
            each.feeds.close(error)
        self.sessions.close(error)

    def _check_open(self) -> None:
        super()._check_open()
        if self.control.refuses:
            raise Paused("the engine is paused, and takes no requests meanwhile")
