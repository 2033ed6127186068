"""The weights that one scheduler's workers serve, and the steps of a swap for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import attrs
import trio

from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.scheduler.calls import WorkerCall

_DISCARD_SECONDS = 5.0


@attrs.define(eq=False)
class Weights:
    """The weights of one scheduler's workers.

    Args:
        call: Calls the worker.
        flush_prefixes: Clears the prefix cache.
    """

    _call: WorkerCall
    _flush_prefixes: Callable[[], int]
    path: str = attrs.field(init=False, default="")
    """Path of the weights for this worker's successors; empty for the model's own."""

    async def read(self, path: str, *, num_bytes: int = 0) -> str:
        """Have the worker read the weights at ``path`` beside those that serve.

        ``num_bytes`` is their size, by which the time limit is set. Returns their checksum.
        """
        checksum: str = await self._call("read_weights", path, num_bytes=num_bytes)
        return checksum

    async def swap(self, path: str, *, num_bytes: int = 0) -> None:
        """Serve the weights that were read; cached prefixes are cleared. No sequence may run."""
        # From here on no page of the old weights leaves the worker, which takes them for the new.
        self._flush_prefixes()
        await self._call("swap_weights", path, num_bytes=num_bytes)
        self.path = path
        self._flush_prefixes()

    async def discard(self) -> None:
        """Have the worker, if there is one, drop the weights that don't serve."""
        with trio.move_on_after(_DISCARD_SECONDS, shield=True):
            with contextlib.suppress(EngineError, WorkerLost):
                await self._call("discard_weights")
