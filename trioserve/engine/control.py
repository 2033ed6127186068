"""What operators do to a running engine: pause it, end requests by name, empty its cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.engine.backend import Backend
from trioserve.model_files import locate
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import CallFailed, InvalidRequest, ModelLoadError
from trioserve.requests.request import Finish, FinishReason, Request, State
from trioserve.scheduler.pause_control import PauseControl
from trioserve.scheduler.weights import HOLDER
from trioserve.workers.power import WorkerPower

if TYPE_CHECKING:
    from trioserve.pooling.batcher import Batcher

PAUSE_MODES = ("abort", "wait", "retract", "in_place")
"""What may become of the requests there are when the engine is paused."""

UPDATE_MODES = ("wait", "abort", "retract")
"""The same when weights are exchanged."""

_OPERATOR = "operator"
_MEMORY = "memory"

_log = get_logger("trioserve.control")


@attrs.define(eq=False)
class Control:
    """The controls of one engine; each is described where the engine offers it.

    Args:
        scheduler: the engine's.
        open_requests: those whose caller's scope is open, at any moment.
        batcher: what has texts computed as a whole, for a model that is for that.
    """

    _scheduler: Backend
    _open_requests: Iterable[Request]
    _batcher: Batcher | None = None
    refuses: bool = attrs.field(init=False, default=False)
    """Whether requests that come are to be refused for a pause."""
    weight_version: str = attrs.field(init=False, default="default")
    """What whoever exchanged the weights last calls them."""

    async def pause(self, mode: str, *, refuse: bool) -> None:
        """See :meth:`trioserve.engine.engine.Engine.pause`."""
        if mode not in PAUSE_MODES:
            modes = ", ".join(PAUSE_MODES)
            raise InvalidRequest(f"mode is one of {modes}, not {mode!r}", param="mode")
        self.refuses = refuse
        pause_control = self._pause_control
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
        self._pause_control.resume(_OPERATOR)
        if self._batcher is not None:
            self._batcher.resume(_OPERATOR)

    def abort(self, request_id: str, *, prefix: bool) -> int:
        """See :meth:`trioserve.engine.engine.Engine.abort`."""
        finish = Finish(FinishReason.ABORT)
        named = [
            request
            for request in self._open_requests
            if (request.id.startswith(request_id) if prefix else request.id == request_id)
        ]
        num_aborted = 0
        for request in named:
            alive = [each for each in request.sequences if each.state is not State.FINISHED]
            # The last one first: nobody is to compute the prompt in place of one that has left.
            for sequence in reversed(alive):
                self._scheduler.abort(sequence, finish)
            num_aborted += bool(alive)
        return num_aborted

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
        """:meth:`update_weights` from the so many bytes that have been found at ``path``."""
        weights = self._scheduler.weights
        assert weights is not None, "it is the engine process that is asked"
        try:
            checksum = await weights.exchange(
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
        """Pause in the name of ``holder`` so that no request has KV of the old weights."""
        pause_control = self._pause_control
        if self._batcher is not None:
            await self._clear_batcher(self._batcher, mode, holder)
            return
        if mode == "wait" and not self._scheduler.paused:
            await pause_control.pause_when_done(holder)
            return
        if mode == "abort":
            self.abort("", prefix=True)
        # In somebody else's pause nobody finishes, so that waiting for it would be for ever.
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
        await self._pause_control.pause(_MEMORY, retract=True)
        if self._batcher is not None:
            await self._batcher.pause(_MEMORY)
        await self._worker_power.turn_off()

    async def resume_memory(self) -> None:
        """See :meth:`trioserve.engine.engine.Engine.resume_memory`."""
        self._worker_power.turn_on()
        self._pause_control.resume(_MEMORY)
        if self._batcher is not None:
            self._batcher.resume(_MEMORY)
        await self._worker_power.wait_there()

    @property
    def memory_released(self) -> bool:
        """See :attr:`trioserve.engine.engine.Engine.memory_released`."""
        return not self._worker_power.is_on

    def flush_cache(self) -> int:
        """See :meth:`trioserve.engine.engine.Engine.flush_cache`."""
        return self._pause_control.flush_prefixes()

    @property
    def _worker_power(self) -> WorkerPower:
        worker_power = self._scheduler.worker_power
        assert worker_power is not None, "it is the engine process that is asked"
        return worker_power

    @property
    def _pause_control(self) -> PauseControl:
        pause_control = self._scheduler.pause_control
        assert pause_control is not None, "it is the engine process that is asked"
        return pause_control


def _locate(model: str) -> tuple[Path, int]:
    """Where ``model`` is, and how many bytes its files have: a single file of weights, too."""
    path = Path(model).expanduser()
    path = path.resolve() if path.is_file() else locate(model).resolve()
    return path, _num_bytes(path)


def _num_bytes(path: Path) -> int:
    """Of a file, or of all files in a folder; 0 where they can't be looked at."""
    with contextlib.suppress(OSError):
        files = path.iterdir() if path.is_dir() else [path]
        return sum(each.stat().st_size for each in files if each.is_file())
    return 0
