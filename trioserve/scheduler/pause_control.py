"""Pauses, during which nothing is computed, and how to wait for them."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve._util.conditions import Conditions
from trioserve.scheduler.core import SchedulerCore


@attrs.define(eq=False)
class PauseControl:
    """The pauses of one scheduler.

    Each caller pauses under its own key, so one resume doesn't end another caller's pause.
    Meanwhile requests are queued, aborted and timed out as usual, and workers may be replaced.

    Args:
        core: Returns the scheduler's core, which exists before the first use.
        wake: Called when there may be something to plan.
    """

    _core: Callable[[], SchedulerCore]
    _wake: Callable[[], None]
    _conditions: Conditions = attrs.field(init=False, factory=Conditions)

    def close(self, holder: str, *, retract: bool = False) -> None:
        """Plan nothing more until :meth:`resume`.

        Args:
            holder: Key of the pause.
            retract: Preempt all running sequences, which resume from their tokens.
        """
        core = self._core()
        core.pause_gate.close(holder)
        if retract:
            core.retract_running()
        self._wake()

    async def wait_drained(self) -> None:
        """Block until nothing is in flight, which is soon after :meth:`close`."""
        core = self._core()
        await self._conditions.wait_for(lambda: core.is_drained)

    def close_behind(self, holder: str) -> int:
        """Hold back all later requests until :meth:`resume`; return the number of the last one."""
        core = self._core()
        core.pause_gate.close_behind(holder, core.num_arrivals)
        return core.num_arrivals

    def has_finished(self, last: int) -> bool:
        """Return True if all requests up to the one of that number have finished."""
        return self._core().num_unfinished_until(last) == 0

    async def wait_finished(self, last: int) -> None:
        """Block until all requests up to the one of that number have finished."""
        await self._conditions.wait_for(lambda: self.has_finished(last))

    def join(self, other: PauseControl) -> None:
        """Take part in all pauses of another scheduler."""
        self._core().pause_gate.join(other._core().pause_gate)

    def resume(self, holder: str) -> None:
        """End the pause of that key. Idempotent."""
        self._core().pause_gate.release(holder)
        self._wake()

    def flush_prefixes(self, *, for_other_weights: bool = False) -> int:
        """Clear the prefix cache; running sequences keep their pages.

        Pages on disk are deleted, unless the worker has other weights now, with other files.

        Returns:
            The number of freed pages.
        """
        core = self._core()
        freed = core.memory.flush(core.running, for_other_weights=for_other_weights)
        self._wake()
        return freed

    def notify(self) -> None:
        """React to a change of the state: a result, an abort, the loss of a worker."""
        self._conditions.notify()
