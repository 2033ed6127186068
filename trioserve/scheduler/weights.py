"""The weights that the workers serve, and their exchange for others."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import attrs
import trio

from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.pause_control import PauseControl

HOLDER = "weights"
"""Key under which an exchange pauses."""
_DISCARD_SECONDS = 5.0


@attrs.define(eq=False)
class Weights:
    """The weights of one scheduler's workers.

    New weights are read while the old ones serve, and swapped in during a pause. Any failure before
    that leaves the old ones in place, for later workers too.

    Args:
        call: Calls the worker.
        pause_control: The scheduler's pauses.
    """

    _call: WorkerCall
    _pause_control: PauseControl
    path: str = attrs.field(init=False, default="")
    """Path of the weights in use; empty for the model's own."""
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    async def exchange(
        self, path: str, clear: Callable[[str], Awaitable[None]], *, num_bytes: int = 0
    ) -> str:
        """Serve the weights at ``path``. Exchanges happen one after another.

        Args:
            path: Path of a folder or a file.
            clear: Pauses the scheduler under the given key so that no sequence holds KV.
            num_bytes: Size of the weights, by which the time limit is set.

        Returns:
            The checksum of the weights.

        Raises:
            EngineError: The worker reports why it can't. The old weights serve.
            WorkerLost: There is no worker, or it was lost or hung meanwhile. The old weights serve.
        """
        async with self._lock:
            try:
                checksum: str = await self._call("read_weights", path, num_bytes=num_bytes)
                await clear(HOLDER)
                # The swap is done or not done: wait until that is known.
                with trio.CancelScope(shield=True):
                    await self._call("swap_weights", path, num_bytes=num_bytes)
                    self.path = path
                    self._pause_control.flush_prefixes()
            except BaseException:
                await self._discard()
                raise
            finally:
                self._pause_control.resume(HOLDER)
            return checksum

    async def _discard(self) -> None:
        """Have the worker, if there is one, drop the weights that don't serve."""
        with trio.move_on_after(_DISCARD_SECONDS, shield=True):
            with contextlib.suppress(EngineError, WorkerLost):
                await self._call("discard_weights")
