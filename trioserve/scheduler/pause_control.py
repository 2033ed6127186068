"""Quiet: a time in which nothing is computed, for whoever needs one, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve._util.conditions import Conditions
from trioserve.scheduler.core import SchedulerCore


@attrs.define(eq=False)
class PauseControl:
    """The pauses of one scheduler.

    Several may want one at the same time: each by a name of its own, and the last one to resume
    ends it. Meanwhile requests are admitted to the queue, aborted and timed out as ever, and
    workers may come and go.

    Args:
        core: gives the scheduler's core, which is there as soon as anybody can ask.
        wake: is called when there may be something to plan.
    """

    _core: Callable[[], SchedulerCore]
    _wake: Callable[[], None]
    _conditions: Conditions = attrs.field(init=False, factory=Conditions)

    async def pause(self, holder: str, *, retract: bool = False) -> None:
        """Have nobody computed until :meth:`resume`; return once nothing is, which is soon.

        Cancelling this leaves the pause in place.

        Args:
            holder: who needs it.
            retract: take the slots and pages of those who run, who will resume from their tokens.
        """
        core = self._core()
        core.pause_gate.close(holder)
        if retract:
            core.retract_running()
        self._wake()
        await self._conditions.wait_for(lambda: core.is_quiet)

    async def pause_when_done(self, holder: str) -> None:
        """:meth:`pause` once all who came before this have finished. Who comes after it waits.

        Cancelling it before that lets everybody in again.
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
        """``holder`` needs no quiet any more. Idempotent."""
        self._core().pause_gate.release(holder)
        self._wake()

    def flush_prefixes(self) -> int:
        """Have no request find what was computed up to now; those that run keep what they have.

        Returns:
            how many pages were freed.
        """
        core = self._core()
        return core.memory.flush(core.running)

    def notify(self) -> None:
        """Something has happened: a result, an abort, the loss of a worker."""
        self._conditions.notify()
