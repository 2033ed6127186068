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

    async def pause(self, holder: str, *, retract: bool = False) -> None:
        """Stop computing until :meth:`resume`; return once nothing is in flight, which is soon.

        Cancelling this leaves the pause in place.

        Args:
            holder: Key of the pause.
            retract: Preempt all running sequences, which resume from their tokens.
        """
        core = self._core()
        core.pause_gate.close(holder)
        if retract:
            core.retract_running()
        self._wake()
        await self._conditions.wait_for(lambda: core.is_drained)

    async def pause_when_done(self, holder: str) -> None:
        """Pause once all requests that have arrived so far have finished; later ones wait.

        Cancelling it before that ends the pause.
        """
        core = self._core()
        last = core.num_arrivals
        core.pause_gate.close_behind(holder, last)
        try:
            await self._conditions.wait_for(lambda: core.num_unfinished_until(last) == 0)
        except BaseException:
            self.resume(holder)
            raise
        await self.pause(holder)

    def resume(self, holder: str) -> None:
        """End the pause of that key. Idempotent."""
        self._core().pause_gate.release(holder)
        self._wake()

    def flush_prefixes(self) -> int:
        """Clear the prefix cache; running sequences keep their pages.

        Returns:
            The number of freed pages.
        """
        core = self._core()
        return core.memory.flush(core.running)

    def notify(self) -> None:
        """React to a change of the state: a result, an abort, the loss of a worker."""
        self._conditions.notify()
