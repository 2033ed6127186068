"""Which weights the workers serve, and how others take their place."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import attrs
import trio

from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.pause_control import PauseControl

HOLDER = "weights"
"""The name in which an exchange pauses."""
_DISCARD_SECONDS = 5.0


@attrs.define(eq=False)
class Weights:
    """The weights of one scheduler's workers.

    New ones are read while the old ones serve, and put in place while nobody is computed. Whatever
    goes wrong before that leaves the old ones in place, for later workers, too.

    Args:
        call: the scheduler's, of the worker.
        quiet: the scheduler's pauses.
    """

    _call: WorkerCall
    _pause_control: PauseControl
    path: str = attrs.field(init=False, default="")
    """Where those are that serve; empty for the model's own."""
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    async def exchange(
        self, path: str, clear: Callable[[str], Awaitable[None]], *, num_bytes: int = 0
    ) -> str:
        """Serve the weights at ``path``; others that want an exchange wait for their turn.

        Args:
            path: of a folder or a file.
            clear: pauses the scheduler in the given name so that nobody holds KV, in whatever way.
            num_bytes: how many there are, which is what the worker is given its time for.

        Returns:
            their checksum.

        Raises:
            EngineError: the worker says why it can't; the old ones serve.
            WorkerLost: there is no worker, or it was lost meanwhile, or took longer than can be;
                the old ones serve.
        """
        async with self._lock:
            try:
                checksum: str = await self._call("read_weights", path, num_bytes=num_bytes)
                await clear(HOLDER)
                # It is done or it isn't: nobody may leave before it is known.
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
        """Have the worker keep nothing but what serves; without one, there is nothing to keep."""
        with trio.move_on_after(_DISCARD_SECONDS, shield=True):
            with contextlib.suppress(EngineError, WorkerLost):
                await self._call("discard_weights")
