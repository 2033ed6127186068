"""The supervisor, which keeps a worker alive: it watches its process, and replaces it when it dies.

:mod:`trioserve.workers.life` has the life of one worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import attrs
import trio

from trioserve.observability.logs import get_logger
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError, NoRoomForWorker, WorkerLost
from trioserve.workers import Link
from trioserve.workers.power import WorkerPower

FIRST_RESTART_DELAY = 0.05
MAX_RESTART_DELAY = 5.0
TAKE_OVER = 1.0
"""Seconds from a loss in which no process loads, if other workers take over the requests.

On a CPU, loading would take their cores while they compute the prompts.
"""

_log = get_logger("trioserve.worker")

Attach = Callable[[Link, wire.Ready], Awaitable[None]]


@attrs.frozen(kw_only=True)
class WorkerLife:
    """The state of the worker."""

    state: str = "starting"
    """``starting`` (the first one loads), ``running``, ``restarting``, ``released`` or ``ended``
    (none will follow).
    """
    since: float = 0.0
    """Time of the last change, in seconds on trio's clock."""
    pid: int | None = None
    """Process id while the worker runs."""
    rank_pids: Sequence[int] = ()
    """Process ids of the ranks behind the first process, in order, while the worker runs."""
    last_loss: str | None = None
    """Reason of the last loss, without confidential text."""


OpenWorker = Callable[[], AbstractAsyncContextManager[tuple[Link, wire.Ready]]]


@attrs.define(eq=False, kw_only=True)
class Supervisor:
    """The task that keeps one worker alive.

    Args:
        open_worker: Opens one worker's life, as :meth:`~trioserve.workers.process.Workers.open`
            does.
        wait_here: Blocks until a worker can be opened; for one that comes from another host.
        max_restarts: Number of deaths without progress that are tolerated.
        judge: Called with every loss; returns the number of losses since there was progress, this
            one included.
        on_loss: Called with every loss, after ``judge``.
        on_replaced: Called with the seconds between a loss and the attachment of the next worker.
        worker_power: State that says if a worker is wanted.
        others_serve: Returns True if the engine has another worker that serves.
        index: The worker's number, for the log.
    """

    open_worker: OpenWorker
    wait_here: Callable[[], Awaitable[None]] | None = None
    max_restarts: int
    judge: Callable[[WorkerLost], int]
    on_loss: Callable[[WorkerLost], None] = lambda _: None
    on_replaced: Callable[[float], None] = lambda _: None
    worker_power: WorkerPower = attrs.field(factory=WorkerPower)
    others_serve: Callable[[], bool] = lambda: False
    index: int = 0
    restarts: int = attrs.field(default=0, init=False)
    """Number of workers replaced since the start."""
    life: WorkerLife = attrs.field(init=False, factory=WorkerLife)
    """State of the present worker."""
    _lost_at: float | None = attrs.field(default=None, init=False)
    """Time of the first loss since a worker was ready."""

    async def run(
        self, attach: Attach, task_status: trio.TaskStatus[wire.Ready] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run workers until cancelled, each served by ``attach``.

        ``task_status`` gets the first worker's :class:`~trioserve.protocol.wire.Ready`.

        Raises:
            ModelLoadError: The model can't be loaded.
            EngineError: The process that was started is not this package's worker.
            WorkerLost: The first worker never got ready, or workers died ``max_restarts + 1`` times
                without progress in between.
        """
        try:
            await self._run(attach, task_status)
        finally:
            self.worker_power.end()
            self._note_life("ended")

    async def _run(self, attach: Attach, task_status: trio.TaskStatus[wire.Ready]) -> None:
        started = False
        attempts = 0
        while True:
            if not self.worker_power.is_on:
                self._note_life("released")
            await self.worker_power.wait_on()
            if not started or self.life.state == "released":
                self._note_life("restarting" if started else "starting")
            if self.wait_here is not None:
                with self.worker_power.wanted() as waiting:
                    await self.wait_here()
                if waiting.cancelled_caught:
                    continue
            serving = trio.CancelScope()
            try:
                async with self.open_worker() as (link, ready):
                    attempts = 0
                    self._note_replaced()
                    self._note_life("running", ready.pid or None, ready.rank_pids)
                    if not started:
                        started = True
                        task_status.started(ready)
                    with self.worker_power.attached() as serving:
                        await attach(link, ready)
            except NoRoomForWorker as error:
                if not started:
                    raise
                # No request caused this, and freeing space takes longer than a few attempts.
                attempts += 1
                _log.error(
                    "no worker can be started",
                    worker=self.index,
                    reason=str(error),
                    attempts=attempts,
                )
                await trio.sleep(_delay(attempts))
                continue
            except WorkerLost as error:
                if serving.cancelled_caught:
                    continue  # It was stopped on request.
                deaths = self._count(error)
                if deaths > self.max_restarts or not started:
                    raise
            except ModelLoadError as error:
                if not started:
                    raise
                # An earlier worker could load it, so the cause may be temporary.
                if (deaths := self._count(WorkerLost(str(error)))) > self.max_restarts:
                    raise
            else:
                assert serving.cancelled_caught, "a worker was let go that wasn't lost"
                _log.info("worker sent away", worker=self.index)
                continue
            self.restarts += 1
            self._note_life("restarting")
            await trio.sleep(max(_delay(deaths), TAKE_OVER if self.others_serve() else 0.0))

    def _count(self, loss: WorkerLost) -> int:
        deaths = self.judge(loss)
        _log.warning(
            "worker lost",
            worker=self.index,
            reason=str(loss),
            kind=loss.reason,
            restarts=self.restarts,
            deaths_without_progress=deaths,
        )
        if self._lost_at is None:
            self._lost_at = trio.current_time()
        # A failed worker's message may have confidential text, so it is only logged.
        told = "it failed; the log tells why" if loss.reason == "failed" else str(loss)
        self.life = attrs.evolve(self.life, last_loss=told)
        self.on_loss(loss)
        return deaths

    def _note_life(self, state: str, pid: int | None = None, rank_pids: Sequence[int] = ()) -> None:
        since = trio.current_time()
        self.life = attrs.evolve(self.life, state=state, since=since, pid=pid, rank_pids=rank_pids)

    def _note_replaced(self) -> None:
        if self._lost_at is not None:
            seconds = trio.current_time() - self._lost_at
            self._lost_at = None
            _log.info(
                "worker replaced",
                worker=self.index,
                seconds=round(seconds, 3),
                restarts=self.restarts,
            )
            self.on_replaced(seconds)


def delay_after(attempts: int, first: float, most: float) -> float:
    """Return the seconds to wait after ``attempts`` failed attempts in a row.

    They double from ``first`` to ``most``.
    """
    doublings = min(max(attempts - 1, 0), 30)  # further ones are too large for a float some day
    return float(min(first * 2**doublings, most))


def _delay(attempts: int) -> float:
    return delay_after(attempts, FIRST_RESTART_DELAY, MAX_RESTART_DELAY)
