"""Checks of an idle engine: its invariants hold, and its workers hold no slots or pages.

The engine and the scheduler call :meth:`IdleCheck.note` when they run out of work; nothing is
polled. A finding is a bug in trioserve. It is logged once with its place and counted; the engine
goes on.
"""

from __future__ import annotations

import traceback
from typing import Any, Protocol

import attrs
import trio

from trioserve.observability.logs import get_logger
from trioserve.observability.metrics import Metrics
from trioserve.observability.statistics import EngineStatistics
from trioserve.protocol.errors import EngineError, WorkerLost

INTERVAL = 1.0
"""Least number of seconds between two checks."""
MAX_SHARE = 0.01
"""Share of the time that checks may take. A check of a large page pool blocks the event loop."""
WORKER_TIMEOUT = 30.0
"""Seconds for the worker to report its slots and pages; it has nothing else to do."""

_log = get_logger("trioserve.engine")


class Checked(Protocol):
    """The parts of an engine that the check needs."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def idle(self) -> bool: ...

    def statistics(self) -> EngineStatistics: ...

    def check_integrity(self) -> None: ...


class AskedWorkers(Protocol):
    """The calls of :class:`~trioserve.engine.schedulers.Schedulers` that the check needs."""

    async def call_all(self, name: str, arguments: object = None) -> list[Any]: ...


@attrs.define(eq=False)
class IdleCheck:
    """The task that checks, and the note that wakes it.

    Args:
        engine: the engine to check.
        workers: the workers to ask, too, for the slots and pages that they hold, if any.
    """

    engine: Checked
    workers: AskedWorkers | None = None
    _noted: trio.Event = attrs.field(init=False, factory=trio.Event)
    _next: float = attrs.field(init=False, default=0.0)
    _known: set[str] = attrs.field(init=False, factory=set)
    """Findings that have been logged."""

    def note(self) -> None:
        """Wake the task because the engine may be idle. Cheap; may be called at any time."""
        self._noted.set()

    async def run(self) -> None:
        """Check whenever the engine is idle again, until cancelled."""
        while True:
            await self._noted.wait()
            await trio.sleep_until(self._next)
            self._noted = trio.Event()
            if self.engine.idle:
                began = trio.current_time()
                self._look()
                took = trio.current_time() - began
                if self.workers is not None:
                    await self._ask(self.workers)
                self._next = trio.current_time() + max(INTERVAL, took / MAX_SHARE)

    def _look(self) -> None:
        try:
            self.engine.check_integrity()
        except Exception as error:  # a state that is broken breaks the check in any way
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = str(error) or place.line or type(error).__name__
            self._report(f"{what} ({place.filename}:{place.lineno})", error)

    async def _ask(self, workers: AskedWorkers) -> None:
        """Report slots and pages that a worker holds, because an idle engine needs none."""
        engine = self.engine
        before = engine.statistics()
        answers: list[Any] = [None]
        with trio.move_on_after(WORKER_TIMEOUT):
            try:
                answers = await workers.call_all("statistics")
            except (EngineError, WorkerLost):
                return
        if not engine.idle or engine.statistics() != before:
            return
        for held in answers:
            if not isinstance(held, dict):
                _log.warning("an idle worker doesn't answer", seconds=WORKER_TIMEOUT)
                continue
            slots, pages = held.get("open_slots", 0), held.get("pages_used", 0)
            if slots or pages:
                self._report(
                    f"the worker holds {slots} slots and {pages} pages of requests that have ended"
                )

    def _report(self, finding: str, error: Exception | None = None) -> None:
        self.engine.metrics.integrity_violations += 1
        if finding not in self._known:
            self._known.add(finding)
            _log.error("integrity violated", finding=finding, exc_info=error)
