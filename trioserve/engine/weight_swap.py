"""The swap of an engine's weights for others, on all of its workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq

import attrs
import trio

from trioserve._util.together import all_together
from trioserve.engine.schedulers import Schedulers
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.scheduler.scheduler import Scheduler

HOLDER = "weights"
"""Key under which a swap pauses."""

_log = get_logger("trioserve.control")


@attrs.define(eq=False)
class WeightSwap:
    """The weight swaps of one engine, one after another.

    New weights are read while the old ones serve, and swapped in during a pause: one of all
    workers, or of one worker after another. Any failure before that leaves the old ones in place,
    for later workers too.
    """

    _schedulers: Schedulers

    async def run(
        self, path: str, clear: Callable[[str], Awaitable[None]] | None, *, num_bytes: int = 0
    ) -> str:
        """Serve the weights at ``path``.

        Args:
            path: Path of a folder or a file.
            clear: Pauses the schedulers under the given key so that no sequence holds KV. None
                pauses one after another, whose requests move to the others.
            num_bytes: Size of the weights, by which the time limit is set.

        Returns:
            The checksum of the weights.

        Raises:
            EngineError: A worker reports why it can't. The old weights serve.
            WorkerLost: There is no worker, or it was lost or hung meanwhile. The old weights serve.
        """

        async def read(_: int, scheduler: Scheduler) -> str:
            return await scheduler.weights.read(path, num_bytes=num_bytes)

        async with self._schedulers.changing:
            try:
                checksums = await all_together(read, self._schedulers)
                if clear is not None:
                    await clear(HOLDER)
                # The swap is done or not done: wait until that is known.
                with trio.CancelScope(shield=True):
                    if clear is None:
                        await self._swap_in_turn(path, num_bytes)
                    else:
                        await self._swap(list(self._schedulers), path, num_bytes)
            except BaseException:
                await all_together(_discard, self._schedulers)
                raise
            finally:
                self._schedulers.resume(HOLDER)
            return checksums[0]

    async def _swap_in_turn(self, path: str, num_bytes: int) -> None:
        """Put the weights in place on one worker after another, while the others go on.

        If the first one can't, its error is raised, and none of the others is asked.
        """
        placement = self._schedulers.placement
        are_new = False
        for scheduler in self._schedulers:
            if scheduler not in self._schedulers:  # It was given up meanwhile.
                continue
            with placement.avoiding(scheduler):
                await placement.vacate(scheduler, HOLDER)
                await self._swap([scheduler], path, num_bytes, others_are_new=are_new)
            scheduler.pause_control.resume(HOLDER)
            are_new = True

    async def _swap(
        self,
        schedulers: Seq[Scheduler],
        path: str,
        num_bytes: int,
        *,
        others_are_new: bool = False,
    ) -> None:
        """Put the weights in place on these workers.

        A worker that fails is replaced by one that loads the new weights, if ``others_are_new`` or
        if another one of these didn't fail. Else the first error is raised.
        """

        async def swap(_: int, scheduler: Scheduler) -> Exception | None:
            try:
                await scheduler.weights.swap(path, num_bytes=num_bytes)
            except (EngineError, WorkerLost) as error:
                return error
            return None

        errors = await all_together(swap, schedulers)
        failures = [(each, error) for each, error in zip(schedulers, errors, strict=True) if error]
        if len(failures) == len(errors) and not others_are_new:
            raise failures[0][1]
        # A worker may have been given up meanwhile.
        failures = [(each, error) for each, error in failures if each in self._schedulers]
        for scheduler, error in failures:
            _log.error("weights not swapped, worker replaced", path=path, reason=str(error))
            scheduler.weights.path = path
        for scheduler, _ in failures:
            await scheduler.worker_power.turn_off()
            scheduler.worker_power.turn_on()


async def _discard(_: int, scheduler: Scheduler) -> None:
    await scheduler.weights.discard()
