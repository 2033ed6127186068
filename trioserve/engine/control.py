"""Operators' calls of a running engine: pause it, end requests by name, empty its cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path

import attrs
import trio

from trioserve._util.together import all_together
from trioserve.engine.lifecycle import abort_by_name
from trioserve.engine.schedulers import Schedulers
from trioserve.engine.weight_swap import WeightSwap
from trioserve.model_files import locate
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import CallFailed, InvalidRequest, ModelLoadError, WorkerLost
from trioserve.requests.request import Request
from trioserve.scheduler.scheduler import Scheduler

PAUSE_MODES = ("abort", "wait", "retract", "in_place")
"""Choices for the existing requests when the engine is paused."""

UPDATE_MODES = ("wait", "abort", "retract", "rolling")
"""Choices for the existing requests when the weights are swapped."""

_OPERATOR = "operator"
_MEMORY = "memory"

_log = get_logger("trioserve.control")


@attrs.define(eq=False)
class Control:
    """The controls of one engine; each is described where the engine offers it.

    Args:
        schedulers: the engine's.
        open_requests: iterates over the requests that are open at that moment.
    """

    _schedulers: Schedulers
    _open_requests: Iterable[Request]
    _weights: WeightSwap = attrs.field(init=False)
    refuses: bool = attrs.field(init=False, default=False)
    """True while a pause refuses new requests."""
    weight_version: str = attrs.field(init=False, default="default")
    """The name of the weights that are served."""

    def __attrs_post_init__(self) -> None:
        self._weights = WeightSwap(self._schedulers)

    async def pause(self, mode: str, *, refuse: bool) -> None:
        """See :meth:`trioserve.engine.engine.Engine.pause`."""
        if mode not in PAUSE_MODES:
            modes = ", ".join(PAUSE_MODES)
            raise InvalidRequest(f"mode is one of {modes}, not {mode!r}", param="mode")
        self.refuses = refuse
        if mode == "wait":
            await self._schedulers.pause_when_done(_OPERATOR)
            return
        if mode == "abort":
            self._abort_all()
        await self._schedulers.pause(_OPERATOR, retract=mode == "retract")

    def resume(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.resume`."""
        self.refuses = False
        self._schedulers.resume(_OPERATOR)

    def abort(self, request_id: str, *, prefix: bool) -> int:
        """End requests by name; return how many were ended."""
        return abort_by_name(self._schedulers, self._open_requests, request_id, prefix=prefix)

    def _abort_all(self) -> None:
        self.abort("", prefix=True)
        for batcher in self._schedulers.batchers:
            batcher.abort_all()

    async def update_weights(self, model: str, mode: str, version: str | None) -> None:
        """See :meth:`trioserve.engine.engine.Engine.update_weights`."""
        if mode not in UPDATE_MODES:
            modes = ", ".join(UPDATE_MODES)
            raise InvalidRequest(f"mode is one of {modes}, not {mode!r}", param="mode")
        self._check_rolling(mode)
        try:
            path, num_bytes = await trio.to_thread.run_sync(_locate, model, abandon_on_cancel=True)
        except ModelLoadError as error:
            raise InvalidRequest(str(error), param="model") from error
        await self.swap_weights(str(path), mode, version, num_bytes=num_bytes)

    async def swap_weights(
        self, path: str, mode: str, version: str | None = None, *, num_bytes: int = 0
    ) -> None:
        """Swap the weights for those at ``path``. Its files have ``num_bytes`` together."""
        clear = None if mode == "rolling" else functools.partial(self._clear, mode)
        try:
            checksum = await self._weights.run(path, clear, num_bytes=num_bytes)
        except CallFailed as error:
            raise InvalidRequest(
                f"the weights stay as they are: {error.reason}", param="model"
            ) from error
        self.weight_version = checksum if version is None else version
        _log.info("weights exchanged", path=path, version=self.weight_version)

    def _check_rolling(self, mode: str) -> None:
        """Refuse the mode ``rolling`` where no other worker could take the requests."""
        if mode != "rolling":
            return
        if self._schedulers.batchers:
            reason = "isn't for encoders, whose workers all have the same weights"
        elif len(list(self._schedulers)) == 1:
            reason = "needs several workers, and there is one"
        else:
            return
        raise InvalidRequest(f"mode rolling {reason}", param="mode")

    async def _clear(self, mode: str, holder: str) -> None:
        """Pause under the key ``holder`` so that no request has KV of the old weights.

        All texts of an encoder's request are computed with the same weights, unless the request
        waits behind another pause.
        """
        if mode == "abort":
            self._abort_all()
        # Under another caller's pause no request finishes, so this would wait for ever.
        finishes = mode == "wait" or self._schedulers.batchers
        if finishes and not self._schedulers.paused:
            await self._schedulers.pause_when_done(holder)
        else:
            await self._schedulers.pause(holder, retract=True)

    async def release_memory(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.release_memory`."""
        await self._schedulers.pause(_MEMORY, retract=True)
        await all_together(_turn_off, self._schedulers)

    async def resume_memory(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.resume_memory`."""
        for each in self._schedulers:
            each.worker_power.turn_on()
        self._schedulers.resume(_MEMORY)
        for each in self._schedulers:
            try:
                await each.worker_power.wait_serving()
            except WorkerLost:
                if each in self._schedulers:  # Otherwise the others go on without it.
                    raise

    @property
    def memory_released(self) -> bool:
        """See :attr:`trioserve.engine.engine.Engine.memory_released`."""
        return not all(each.worker_power.is_on for each in self._schedulers)

    def flush_cache(self) -> int:
        """See :meth:`trioserve.engine.engine.Engine.flush_cache`."""
        return sum(each.pause_control.flush_prefixes() for each in self._schedulers)


async def _turn_off(_: int, scheduler: Scheduler) -> None:
    await scheduler.worker_power.turn_off()


def _locate(model: str) -> tuple[Path, int]:
    """Return the path of ``model``, a folder or a single file, and the bytes of its files."""
    path = Path(model).expanduser()
    path = path.resolve() if path.is_file() else locate(model).resolve()
    return path, _num_bytes(path)


def _num_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder; 0 if they can't be read."""
    with contextlib.suppress(OSError):
        files = path.iterdir() if path.is_dir() else [path]
        return sum(each.stat().st_size for each in files if each.is_file())
    return 0
