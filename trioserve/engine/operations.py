"""An engine as its operators see it."""

from __future__ import annotations

import contextlib
from os import PathLike
from typing import Any

from trioserve._util.feed import DEFAULT_MAX_RECORDS, Subscription
from trioserve.config import EngineConfig
from trioserve.config.adapter_paths import absolute, check_name
from trioserve.engine.backend import Backend
from trioserve.engine.control import Control
from trioserve.pooling.requests import Pooling
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.adapters import Adapter
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.iterations import Iteration


class OperatedEngine:
    """What :class:`trioserve.Engine` offers them; :class:`Control` and the scheduler do it."""

    __slots__ = ()

    config: EngineConfig
    model_name: str
    control: Control
    pooling: Pooling
    _scheduler: Backend

    async def pause(self, mode: str = "abort", *, refuse: bool = False) -> None:
        """Compute nothing until :meth:`resume`; return once nothing is computed any more.

        Streams stay open, deadlines go on. Idempotent; the last call's arguments count.

        Args:
            mode: what becomes of the requests there are. ``abort``: they end, with what they have
                and the finish reason ``abort``. ``wait``: they finish first, while those that come
                later wait. ``retract``: they keep their tokens, and their KV is computed anew
                after the pause. ``in_place``: they keep their KV, too.
            refuse: whether requests that come during the pause are refused with
                :exc:`~trioserve.protocol.errors.Paused`; else they wait in the queue.

        Raises:
            InvalidRequest: there is no such mode.
        """
        await self.control.pause(mode, refuse=refuse)

    def resume(self) -> None:
        """End the pause: what waits is computed, the same as without the pause. Idempotent."""
        self.control.resume()

    @property
    def paused(self) -> bool:
        """Whether nothing is computed because somebody has asked for that."""
        return self._scheduler.paused

    def abort(self, request_id: str, *, prefix: bool = False) -> int:
        """End requests by name, with what they have and the finish reason ``abort``. Never blocks.

        A request that isn't admitted yet raises :exc:`~trioserve.protocol.errors.RequestAborted`.

        Args:
            request_id: as given to :meth:`generate`.
            prefix: end all whose names begin so; the empty string ends all.

        Returns:
            how many were ended.
        """
        num_aborted = self.control.abort(request_id, prefix=prefix)
        return num_aborted + self.pooling.open.abort(request_id, prefix=prefix)

    async def update_weights(
        self, model: str, *, mode: str = "wait", weight_version: str | None = None
    ) -> None:
        """Serve other weights of the same model from now on, in later workers, too.

        They are read and checked while the old ones serve; then, for a moment, nobody is computed.
        Whatever goes wrong, the old ones serve on. Prefixes that were computed with them are not
        found any more.

        Args:
            model: a folder, a GGUF file, a Hub id, or a single safetensors file with all tensors
                (in shared memory, for one, under ``/dev/shm``), to be left there for later workers.
            mode: what becomes of the requests there are. ``wait``: they finish first, with the old
                weights, while those that come later wait; in a pause, in which nobody finishes, it
                means the same as ``retract``. ``abort``: they end, with what they have.
                ``retract``: they go on with the new weights from the tokens that they have.
            weight_version: what :attr:`weight_version` is to say (default: a checksum).

        Raises:
            InvalidRequest: there are no such weights, they are another model's, or damaged.
            WorkerLost: there is no worker, or it was lost meanwhile; the old weights serve.
        """
        await self.control.update_weights(model, mode, weight_version)

    @property
    def weight_version(self) -> str:
        """What the weights are called that serve: ``default`` for those that were loaded first."""
        return self.control.weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self.control.weight_version = version

    async def release_memory(self) -> None:
        """Give the worker's memory back, all of it: its process ends. Idempotent.

        Requests keep their tokens and go on after :meth:`resume_memory`; those that come meanwhile
        wait. Deadlines go on.
        """
        await self.control.release_memory()

    async def resume_memory(self) -> None:
        """Have a worker again; return once it has loaded the model. Idempotent."""
        await self.control.resume_memory()

    @property
    def memory_released(self) -> bool:
        """Whether there is no worker because somebody has asked for its memory."""
        return self.control.memory_released

    def flush_cache(self) -> int:
        """Have no request find what has been computed up to now. What runs goes on with its own.

        Returns:
            how many pages of the KV cache were freed.
        """
        return self.control.flush_cache()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name, in the order in which they were loaded."""
        return tuple(self._scheduler.adapters.catalogue)

    async def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA adapter that requests may then name; what runs goes on meanwhile.

        Args:
            name: for requests; of no adapter that is loaded, nor the model's own.
            path: a folder with PEFT's adapter_config.json and adapter_model.safetensors.

        Raises:
            AdapterNotFound: there is no such folder.
            InvalidRequest: the files can't be served, and why; or the name is taken, or adapters
                aren't served (``enable_lora``).
            WorkerLost: the worker was lost while it loaded it.
            EngineError: it couldn't.
        """
        if not self.config.serves_adapters:
            raise InvalidRequest("adapters aren't served: start with --enable-lora", param="name")
        check_name(name)
        if name == self.model_name:
            raise InvalidRequest(f"{name!r} is the model's own name", param="name")
        await self._scheduler.adapters.load(name, absolute(path))

    async def unload_adapter(self, name: str) -> None:
        """Let no request name an adapter any more, and return once those have ended that use it.

        A request that isn't in the queue yet is refused. Cancelling this only ends the wait.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        await self._scheduler.adapters.unload(name)

    def iterations(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[Iteration]]:
        """A record of each step: ``with engine.iterations() as iterations``, then read them.

        Nothing is recorded while nobody reads. A reader that is too slow for what comes loses the
        oldest records; ``iterations.num_dropped`` tells how many.

        Args:
            max_records: how many may wait to be read.
        """
        return self._feeds.iterations.feed.subscribe(max_records)

    def cache_events(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[CacheEvent]]:
        """What comes into the prefix cache and goes out of it, as :meth:`iterations` tells steps.

        A page is told of when a plan is made that computes it.
        """
        return self._feeds.cache.feed.subscribe(max_records)

    async def call_worker(self, name: str, arguments: object = None) -> Any:
        """Ask the worker for something rare, by name, and return its answer.

        Raises:
            EngineError: the worker refused.
            WorkerLost: it died before it answered.
        """
        return await self._scheduler.call(name, arguments)

    @property
    def _feeds(self) -> Feeds:
        feeds = self._scheduler.feeds
        assert feeds is not None, "it is the engine process that tells"
        return feeds
