"""Operators' calls of a running engine: pause it, end requests by name, empty its cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path

import attrs
import trio

from trioserve.engine.lifecycle import abort_by_name
from trioserve.model_files import locate
from trioserve.observability.logs import get_logger
from trioserve.pooling.batcher import Batcher
from trioserve.protocol.errors import CallFailed, InvalidRequest, ModelLoadError
from trioserve.requests.request import Request
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.weights import HOLDER

PAUSE_MODES = ("abort", "wait", "retract", "in_place")
"""Choices for the existing requests when the engine is paused."""

UPDATE_MODES = ("wait", "abort", "retract")
"""Choices for the existing requests when the weights are swapped."""

_OPERATOR = "operator"
_MEMORY = "memory"

_log = get_logger("trioserve.control")


@attrs.define(eq=False)
class Control:
    """The controls of one engine; each is described where the engine offers it.

    Args:
        scheduler: the engine's.
        open_requests: iterates over the requests that are open at that moment.
        batcher: computes texts as a whole, for an encoder.
    """

    _scheduler: Scheduler
    _open_requests: Iterable[Request]
    _batcher: Batcher | None = None
    refuses: bool = attrs.field(init=False, default=False)
    """True while a pause refuses new requests."""
    weight_version: str = attrs.field(init=False, default="default")
    """The name of the weights that are served."""

    async def pause(self, mode: str, *, refuse: bool) -> None:
        """See :meth:`trioserve.engine.engine.Engine.pause`."""
        if mode not in PAUSE_MODES:
            modes = ", ".join(PAUSE_MODES)
            raise InvalidRequest(f"mode is one of {modes}, not {mode!r}", param="mode")
        self.refuses = refuse
        pause_control = self._scheduler.pause_control
        if mode == "wait":
            if self._batcher is not None:
                await self._batcher.pause_when_done(_OPERATOR)
            await pause_control.pause_when_done(_OPERATOR)
            return
        if mode == "abort":
            self.abort("", prefix=True)
            if self._batcher is not None:
                self._batcher.abort_all()
        await pause_control.pause(_OPERATOR, retract=mode == "retract")
        if self._batcher is not None:
            await self._batcher.pause(_OPERATOR)

    def resume(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.resume`."""
        self.refuses = False
        self._scheduler.pause_control.resume(_OPERATOR)
        if self._batcher is not None:
            self._batcher.resume(_OPERATOR)

    def abort(self, request_id: str, *, prefix: bool) -> int:
        """End requests by name; return how many were ended."""
        return abort_by_name(self._scheduler, self._open_requests, request_id, prefix=prefix)

    async def update_weights(self, model: str, mode: str, version: str | None) -> None:
        """See :meth:`trioserve.engine.engine.Engine.update_weights`."""
        if mode not in UPDATE_MODES:
            modes = ", ".join(UPDATE_MODES)
            raise InvalidRequest(f"mode is one of {modes}, not {mode!r}", param="mode")
        try:
            path, num_bytes = await trio.to_thread.run_sync(_locate, model, abandon_on_cancel=True)
        except ModelLoadError as error:
            raise InvalidRequest(str(error), param="model") from error
        await self.exchange_weights(str(path), mode, version, num_bytes=num_bytes)

    async def exchange_weights(
        self, path: str, mode: str, version: str | None = None, *, num_bytes: int = 0
    ) -> None:
        """Swap the weights for those at ``path``. Its files have ``num_bytes`` together."""
        try:
            checksum = await self._scheduler.weights.exchange(
                path, functools.partial(self._clear, mode), num_bytes=num_bytes
            )
        except CallFailed as error:
            raise InvalidRequest(
                f"the weights stay as they are: {error.reason}", param="model"
            ) from error
        finally:
            if self._batcher is not None:
                self._batcher.resume(HOLDER)
        self.weight_version = checksum if version is None else version
        _log.info("weights exchanged", path=path, version=self.weight_version)

    async def _clear(self, mode: str, holder: str) -> None:
        """Pause under the key ``holder`` so that no request has KV of the old weights."""
        pause_control = self._scheduler.pause_control
        if self._batcher is not None:
            await self._clear_batcher(self._batcher, mode, holder)
            return
        if mode == "wait" and not self._scheduler.paused:
            await pause_control.pause_when_done(holder)
            return
        if mode == "abort":
            self.abort("", prefix=True)
        # Under another caller's pause no request finishes, so this would wait for ever.
        await pause_control.pause(holder, retract=True)

    async def _clear_batcher(self, batcher: Batcher, mode: str, holder: str) -> None:
        """Pause so that all texts of a request are computed with the same weights.

        Texts that wait behind another pause may be computed with either.
        """
        if mode == "abort":
            batcher.abort_all()
        if self._scheduler.paused:
            await batcher.pause(holder)
        else:
            await batcher.pause_when_done(holder)

    async def release_memory(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.release_memory`."""
        await self._scheduler.pause_control.pause(_MEMORY, retract=True)
        if self._batcher is not None:
            await self._batcher.pause(_MEMORY)
        await self._scheduler.worker_power.turn_off()

    async def resume_memory(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.resume_memory`."""
        self._scheduler.worker_power.turn_on()
        self._scheduler.pause_control.resume(_MEMORY)
        if self._batcher is not None:
            self._batcher.resume(_MEMORY)
        await self._scheduler.worker_power.wait_there()

    @property
    def memory_released(self) -> bool:
        """See :attr:`trioserve.engine.engine.Engine.memory_released`."""
        return not self._scheduler.worker_power.is_on

    def flush_cache(self) -> int:
        """See :meth:`trioserve.engine.engine.Engine.flush_cache`."""
        return self._scheduler.pause_control.flush_prefixes()


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
