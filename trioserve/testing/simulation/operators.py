"""The operators of a run: they pause the engine, swap weights, add and remove workers."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve.engine.engine import Engine
from trioserve.protocol.errors import CallFailed, InvalidRequest, TrioserveError, WorkerLost
from trioserve.testing.simulation.cluster import ClusterChecker
from trioserve.testing.simulation.scenario import Pause, Scenario, WorkerChange
from trioserve.testing.simulation.trace import Trace, Violation
from trioserve.testing.simulation.workers import SimulatedWorkers


@attrs.define(eq=False)
class Operators:
    """The operators of one scenario.

    Args:
        scenario: The scenario.
        trace: Takes the events.
        checkers: Are told of pauses.
        workers: The workers.
        check: Checks the engine.
    """

    _scenario: Scenario
    _trace: Trace
    _checkers: ClusterChecker
    _workers: SimulatedWorkers
    _check: Callable[[], None]
    pausing: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    """Held during a pause, because the engine allows one at a time."""
    num_changing: int = attrs.field(init=False, default=0)
    """Workers that are being added or removed."""
    _weights: str = attrs.field(init=False, default="")
    """The weights that were swapped in last."""

    # ---- pauses

    async def pause(self, engine: Engine, pause: Pause) -> None:
        """Wait until the time of ``pause``, then carry it out."""
        await trio.sleep(pause.at)
        async with self.pausing:
            self._trace.note(f"pause: {pause.mode}")
            # A preempted output may run after another one that found a free slot.
            self._checkers.disturb()
            try:
                await self._hold(engine, pause)
            except TrioserveError as error:
                # The worker or the engine has ended meanwhile.
                self._trace.note(f"the pause fails: {error!r}")
            self._trace.note("the pause ends")

    async def _hold(self, engine: Engine, pause: Pause) -> None:
        early = self._queued()
        if pause.mode.startswith("swap "):
            weights = f"weights of {trio.current_time()}"
            mode = pause.mode.partition(" ")[2]
            await engine.control.swap_weights(weights, mode)
            self._weights = weights
            if mode != "rolling":  # Then some caches have pages of the new weights by now.
                self._checkers.begin_again()
            return
        if pause.mode == "release":
            await engine.release_memory()
        else:
            await engine.pause(pause.mode)
        self._checkers.places.is_paused = True
        if pause.mode == "wait" and (left := early & self._queued()):
            raise Violation("a pause waits for all requests that have come", f"{sorted(left)}")
        if pause.flushes and pause.mode != "release":
            self._trace.note(f"{engine.flush_cache()} pages are flushed")
            self._checkers.begin_again()
            self._check()
        await trio.sleep(pause.seconds)
        self._checkers.places.is_paused = False
        if pause.mode == "release":
            await engine.resume_memory()
        else:
            engine.resume()

    def _queued(self) -> set[str]:
        """Return the ids of all requests that the workers have."""
        cores = [each.scheduler.core for each in self._workers.made.values()]
        return {
            request.id
            for core in cores
            if core is not None
            for request in core.unfinished_requests()
        }

    def check_weights(self) -> None:
        """Check that all workers have the weights that were swapped in last."""
        found = {index: worker.weights for index, worker in self._workers.current.items()}
        if any(weights != self._weights for weights in found.values()):
            raise Violation("all workers have the same weights", f"{found}, not {self._weights!r}")

    # ---- workers

    async def change(self, engine: Engine, change: WorkerChange) -> None:
        """Wait until the time of ``change``, then carry it out.

        Raises:
            Violation: It didn't end as expected.
        """
        await trio.sleep(change.at)
        what = f"{change.what} worker" + (f" {change.index}" if change.what == "remove" else "")
        self._trace.note(what)
        self._checkers.disturb()
        self.num_changing += 1
        try:
            if change.what == "add":
                self._checkers.members.add((await engine.add_worker()).index)
            else:
                await engine.remove_worker(change.index)
                self._check_removed(change.index)
        except (InvalidRequest, CallFailed, WorkerLost) as error:
            self._trace.note(f"{what}: {error!r}")
            self._check_refusal(error)
        self.num_changing -= 1
        self._checkers.disturb()
        self._trace.note(f"end of {what}")

    def _check_removed(self, index: int) -> None:
        """Check that nothing is left of a worker that was removed."""
        self._checkers.members.remove(index)
        core = self._workers.made[index].scheduler.core
        left = [] if core is None else [each.id for each in core.unfinished_requests()]
        if left or index in self._workers.current:
            raise Violation("a removed worker has nothing any more", f"worker {index}: {left}")

    def _check_refusal(self, error: TrioserveError) -> None:
        """Check that workers could not be changed for a reason."""
        if not isinstance(error, InvalidRequest) and not self._scenario.faults:
            raise Violation("workers can be added and removed", repr(error)) from error
