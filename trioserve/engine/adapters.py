"""The adapters of an engine: loaded and unloaded by name, by all schedulers or by none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import trio

from trioserve._util.together import all_together
from trioserve.model_files.prompt_adapter import (
    is_prefix,
    is_prompt_adapter,
    read_prompt_adapter,
)
from trioserve.protocol.errors import EngineError, InvalidRequest, ModelLoadError, WorkerLost
from trioserve.requests.adapters import Adapter, Catalogue
from trioserve.requests.embedded import PREFIX, EmbeddedSpan, EmbeddingsPrompt
from trioserve.scheduler.adapters import AdapterManager
from trioserve.scheduler.limits import SchedulerLimits


@attrs.define(eq=False)
class EngineAdapters:
    """The adapters that requests of one engine may name.

    Args:
        managers: Returns the manager of each scheduler's adapters.
    """

    _managers: Callable[[], Sequence[AdapterManager]]
    catalogue: Catalogue = attrs.field(init=False, factory=Catalogue)
    on_change: Callable[[], None] = attrs.field(init=False, default=lambda: None)
    """Called when the catalogue has changed."""
    _loading: set[str] = attrs.field(init=False, factory=set)
    """Names of the adapters that are being loaded."""
    _last_number: int = attrs.field(init=False, default=0)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter: see :meth:`trioserve.Engine.load_adapter`. Cancelling undoes it.

        A prompt adapter is read here, in a thread. Anything else is the worker's.
        """
        if name in self.catalogue or name in self._loading:
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already: unload it first", param="name"
            )
        self._last_number += 1
        adapter = Adapter(number=self._last_number, name=name, path=path)

        async def load(_: int, manager: AdapterManager) -> None:
            await manager.load(adapter)

        self._loading.add(name)
        try:
            limits = self._managers()[0].limits
            adapter = await trio.to_thread.run_sync(
                _with_spans, adapter, limits, abandon_on_cancel=True
            )
            # A worker may be added meanwhile.
            while lacking := [each for each in self._managers() if not each.holds(adapter)]:
                await all_together(load, lacking)
        except BaseException:
            for each in self._managers():
                each.forget(adapter)
            raise
        finally:
            self._loading.remove(name)
        self.catalogue.add(adapter)
        self.on_change()

    async def load_all(self, manager: AdapterManager) -> None:
        """Load the adapters that requests may name on a worker that is about to serve.

        Raises:
            InvalidRequest: An adapter can't be served there.
            WorkerLost: The worker was lost meanwhile.
            EngineError: It couldn't load one.
        """
        while lacking := [each for each in self.catalogue if not manager.holds(each)]:
            await manager.load(lacking[0])
        manager.keep(list(self.catalogue))

    async def load_first(self, named_paths: Sequence[tuple[str, str]]) -> None:
        """Load the adapters given at the start, by name and folder.

        Raises:
            ModelLoadError: An adapter can't be served; the message says why and what to do.
        """
        for name, path in named_paths:
            try:
                await self.load(name, path)
            except (InvalidRequest, EngineError, WorkerLost) as error:
                raise ModelLoadError(f"the adapter {name!r} can't be loaded: {error}") from error

    async def unload(self, name: str) -> None:
        """Unload an adapter: see :meth:`trioserve.Engine.unload_adapter`. Cancelling doesn't stop
        it.
        """
        adapter = self.catalogue.remove(name)
        self.on_change()
        # A request that uses it takes it along when it moves to another worker.
        while holding := [each for each in self._managers() if each.holds(adapter)]:
            for gone in [each.unload(adapter) for each in holding]:
                await gone.wait()

    def name_of(self, number: int) -> str | None:
        """Return the name of the adapter with that number; None if it is unknown."""
        adapter = self._find(number)
        return None if adapter is None else adapter.name

    def spans_of(self, number: int) -> Sequence[EmbeddedSpan]:
        """Return what the prompt adapter with that number has of its virtual tokens; nothing if it
        is no such.
        """
        adapter = self._find(number)
        return () if adapter is None else adapter.spans

    def _find(self, number: int) -> Adapter | None:
        found = (each.find(number) for each in self._managers())
        return next((adapter for adapter in found if adapter is not None), None)


def _with_spans(adapter: Adapter, limits: SchedulerLimits) -> Adapter:
    """Return a prompt adapter with the rows of its virtual tokens, and another one as it is.

    Raises:
        InvalidRequest: The files can't be served.
    """
    folder = Path(adapter.path)
    if not is_prompt_adapter(folder):
        return adapter
    try:
        rows = read_prompt_adapter(
            folder, limits.embedding_width, limits.max_model_len, limits.kv_shape
        )
    except ModelLoadError as error:
        raise InvalidRequest(str(error), param="path") from error
    spans = EmbeddingsPrompt(rows).spans(0, 0, len(rows))
    if is_prefix(folder):
        spans = [attrs.evolve(each, kind=PREFIX) for each in spans]
    return attrs.evolve(adapter, num_virtual_tokens=len(rows), spans=tuple(spans))
