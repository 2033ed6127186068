"""An engine as its operators see it."""

from __future__ import annotations

import contextlib
from os import PathLike

from trioserve._util.feed import DEFAULT_MAX_RECORDS, Subscription
from trioserve.config import EngineConfig
from trioserve.config.adapter_paths import absolute, check_name
from trioserve.engine.control import Control
from trioserve.engine.schedulers import Schedulers
from trioserve.protocol.errors import InvalidRequest
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration


def check_adapter(name: str, config: EngineConfig, model_name: str) -> None:
    """Check the name of an adapter that is to be loaded.

    Raises:
        InvalidRequest: it can't be used, or adapters aren't served.
    """
    if not config.serves_adapters:
        raise InvalidRequest("adapters aren't served: start with --enable-lora", param="name")
    check_name(name)
    if name == model_name:
        raise InvalidRequest(f"{name!r} is the model's own name", param="name")


class OperatedEngine:
    """Operators' calls of :class:`trioserve.Engine`, done by :class:`Control` and schedulers."""

    __slots__ = ()

    config: EngineConfig
    model_name: str
    control: Control
    _backend: Schedulers

    async def pause(self, mode: str = "abort", *, refuse: bool = False) -> None:
        """Compute nothing until :meth:`resume`; return once nothing is computed any more.

        Streams stay open, deadlines go on. Idempotent; the last call's arguments count.

        Args:
            mode: the fate of existing requests. ``abort``: they end with their output so far and
                the finish reason ``abort``. ``wait``: they finish first, while later ones wait.
                ``retract``: they keep their tokens, and their KV is computed again after the
                pause. ``in_place``: they keep their KV, too.
            refuse: whether requests that come during the pause are refused with
                :exc:`~trioserve.protocol.errors.Paused`; else they wait in the queue.

        Raises:
            InvalidRequest: there is no such mode.
        """
        await self.control.pause(mode, refuse=refuse)

    def resume(self) -> None:
        """End the pause. Waiting requests are computed as if there had been none. Idempotent."""
        self.control.resume()

    async def update_weights(
        self, model: str, *, mode: str = "wait", weight_version: str | None = None
    ) -> None:
        """Serve other weights of the same model from now on, in later workers, too.

        They are read and checked while the old ones serve. Then nothing is computed for a moment.
        On any error the old weights go on serving. Prefixes that were computed with the old weights
        are no longer found.

        Args:
            model: a folder, a GGUF file, a Hub id, or a single safetensors file with all tensors
                (in shared memory, for one, under ``/dev/shm``), to be left there for later workers.
            mode: what becomes of the requests there are. ``wait``: they finish first, with the old
                weights, while later ones wait. In a pause no request finishes, so it means the same
                as ``retract``. ``abort``: they end with their output so far. ``retract``: they go
                on with the new weights from the tokens that they have. ``rolling``: one worker
                after another gets the new weights, while its requests go on elsewhere, with the
                weights of the worker that they are moved to.
            weight_version: the new value of :attr:`weight_version` (default: a checksum).

        Raises:
            InvalidRequest: there are no such weights, they are another model's, or damaged; or
                ``mode`` is ``rolling`` with one worker or an encoder.
            WorkerLost: there is no worker, or it was lost meanwhile; the old weights serve.
        """
        await self.control.update_weights(model, mode, weight_version)

    @property
    def weight_version(self) -> str:
        """The name of the weights that are served: ``default`` for those that were loaded first."""
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
        """Start a worker again; return once it has loaded the model. Idempotent."""
        await self.control.resume_memory()

    @property
    def memory_released(self) -> bool:
        """True if there is no worker because its memory was released."""
        return self.control.memory_released

    def flush_cache(self) -> int:
        """Empty the prefix cache. Running requests keep their own pages.

        Returns:
            how many pages of the KV cache were freed.
        """
        return self.control.flush_cache()

    async def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA or prompt adapter that requests may then name; what runs goes on meanwhile.

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
        check_adapter(name, self.config, self.model_name)
        await self._backend.adapters.load(name, absolute(path))

    async def unload_adapter(self, name: str) -> None:
        """Let no request name an adapter any more, and return once those have ended that use it.

        A request that isn't in the queue yet is refused. Cancelling this only ends the wait.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        await self._backend.adapters.unload(name)

    def iterations(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[Iteration]]:
        """Record each step: ``with engine.iterations() as iterations``, then read them.

        Nothing is recorded without a reader. A reader that is too slow loses the oldest records;
        ``iterations.num_dropped`` counts them.

        Args:
            max_records: how many may wait to be read.
        """
        return self._backend.iterations(max_records)

    def cache_events(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[CacheEvent]]:
        """Record additions to the prefix cache and evictions, as :meth:`iterations` does steps.

        A page is recorded when a plan is made that computes it.
        """
        return self._backend.cache_events(max_records)
