"""The adapters of one scheduler, which are loaded again on each worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import attrs
import trio

from trioserve.observability.logs import get_logger
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.protocol.errors import (
    AdapterNotFound,
    EngineError,
    InvalidRequest,
    WorkerLost,
)
from trioserve.requests.adapters import Adapter
from trioserve.requests.request import Finish, FinishReason, Request, SequenceOutput
from trioserve.scheduler.adapter_residency import LoadAdapter, UnloadAdapter
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.limits import SchedulerLimits

_log = get_logger("trioserve.scheduler")


@attrs.define(eq=False)
class HeldAdapter:
    """An adapter from its load until no sequence uses it any more."""

    adapter: Adapter
    checksum: str = ""
    """Checksum of its files; empty until they have been read once."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """Set when the first load has succeeded or failed (``error``)."""
    error: Exception | None = None
    is_leaving: bool = False
    gone: trio.Event = attrs.field(factory=trio.Event)
    """Set when no sequence uses the adapter and none will."""


@attrs.define(eq=False)
class AdapterManager:
    """The adapters that one scheduler holds; their names are the engine's.

    Args:
        core: Returns the scheduler's core, which exists before the first use.
        call: Calls the worker.
        wake: Called when there may be something to plan.
        deliver: Takes the ends of sequences.
    """

    _core: Callable[[], SchedulerCore]
    _call: Callable[[str, object], Awaitable[Any]]
    _wake: Callable[[], None]
    _deliver: Callable[[list[SequenceOutput]], None]
    _held: dict[int, HeldAdapter] = attrs.field(init=False, factory=dict)
    """Adapters by number: those that are loaded, being loaded, or being unloaded."""
    _loading: int = attrs.field(init=False, default=0)
    """Number of the adapter that the worker is loading; 0 for none."""
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def load(self, adapter: Adapter) -> None:
        """Load an adapter. Cancelling undoes it.

        The worker needs nothing of a prompt adapter.

        Raises:
            AdapterNotFound: There is no such folder.
            InvalidRequest: The files can't be served.
            WorkerLost: The worker was lost while it loaded them.
            EngineError: It couldn't.
        """
        for needs, takes, what in (
            (adapter.num_virtual_tokens, self.limits.embedding_width, "embeddings"),
            (adapter.has_prefix, self.limits.kv_shape, "keys and values"),
        ):
            if needs and not takes:
                raise InvalidRequest(
                    f"the worker takes no {what}, as those of {adapter.path}", param="path"
                )
        held = self._held[adapter.number] = HeldAdapter(adapter)
        self._begin_use(held)
        try:
            await held.settled.wait()
            if held.error is not None:
                raise held.error
        except BaseException:
            self.forget(adapter)
            raise
        if adapter.num_virtual_tokens:
            _log.info(
                "adapter loaded", name=adapter.name, virtual_tokens=adapter.num_virtual_tokens
            )

    def _begin_use(self, held: HeldAdapter) -> None:
        """Let sequences use an adapter that is held, once the worker has what it needs of it."""
        number, residency = held.adapter.number, self._core().residency
        if held.adapter.num_virtual_tokens:
            residency.known.add(number)
            held.settled.set()
        else:
            residency.ask(number)
            self._recheck()

    @property
    def limits(self) -> SchedulerLimits:
        """The scheduler's limits."""
        return self._core().limits

    def holds(self, adapter: Adapter) -> bool:
        """Return True if the adapter is loaded, being loaded, or being unloaded."""
        return adapter.number in self._held

    def held(self, number: int) -> HeldAdapter | None:
        """Return the adapter of that number as it is held here; None for 0, which is no adapter."""
        return self._held[number] if number else None

    def hold(self, source: HeldAdapter | None) -> None:
        """Hold the adapter of a request as the scheduler does that it comes from.

        An adapter that is being unloaded may be held only where requests use it.
        """
        if source is not None and source.adapter.number not in self._held:
            number = source.adapter.number
            held = HeldAdapter(source.adapter, source.checksum, is_leaving=source.is_leaving)
            held.settled.set()
            self._held[number] = held
            self._begin_use(held)

    def keep(self, adapters: Collection[Adapter]) -> None:
        """Unload all adapters but these."""
        for held in list(self._held.values()):
            if held.adapter not in adapters:
                self.unload(held.adapter)

    def close(self) -> None:
        """End all waits for loads and unloads, because there will be no worker any more."""
        for held in self._held.values():
            held.settled.set()
            held.gone.set()

    def unload(self, adapter: Adapter) -> trio.Event:
        """Unload an adapter that no request may name any more.

        Returns:
            An event that is set once no sequence uses it.
        """
        held = self._held[adapter.number]
        held.is_leaving = True
        self._forget_unused()
        return held.gone

    def named_in(self, statistics: SchedulerStatistics) -> SchedulerStatistics:
        """Return ``statistics`` with the names of the adapters in use."""
        if not self._held:
            return statistics
        running, waiting = self._core().adapters_in_use()
        return attrs.evolve(
            statistics, running_adapters=self._names(running), waiting_adapters=self._names(waiting)
        )

    def find(self, number: int) -> Adapter | None:
        """Return the adapter with that number; None if it is unknown."""
        held = self._held.get(number)
        return None if held is None else held.adapter

    def name_of(self, number: int) -> str | None:
        """Return the name of the adapter with that number; None if it is unknown."""
        adapter = self.find(number)
        return None if adapter is None else adapter.name

    def _names(self, numbers: set[int]) -> tuple[str, ...]:
        return tuple(sorted({self._held[each].adapter.name for each in numbers if each}))

    def notify(self) -> None:
        """React to a change of the state: a plan, a result, an abort, the loss of a worker."""
        if self._held:
            self._forget_unused()
            if self._core().residency.wants_change:
                self._recheck()

    def _recheck(self) -> None:
        self._changed.set()

    def _forget_unused(self) -> None:
        """Forget unloaded adapters that no sequence uses any more."""
        for held in [each for each in self._held.values() if each.is_leaving]:
            if not self._core().has_adapter_users(held.adapter.number):
                self.forget(held.adapter)

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter that no sequence uses. Idempotent."""
        held = self._held.pop(adapter.number, None)
        if held is not None:
            self._core().forget_adapter(adapter.number)
            held.gone.set()
            self._recheck()

    async def serve(self) -> None:
        """Run the task for one worker's life: load and unload adapters, one at a time.

        Raises:
            WorkerLost: The worker was lost.
        """
        while True:
            core = self._core()
            match core.residency.next_change(core.running_adapters):
                case UnloadAdapter(number):
                    core.residency.on_unload(number)
                    await self._call("unload_adapter", number)
                case LoadAdapter(number):
                    self._loading = number
                    await self._load(self._held[number])
                    self._loading = 0
                    self._wake()
                case None:
                    self._changed = trio.Event()
                    await self._changed.wait()

    async def _load(self, held: HeldAdapter) -> None:
        adapter = held.adapter
        arguments = {
            "number": adapter.number,
            "path": adapter.path,
            "checksum": held.checksum,
        }
        residency, began = self._core().residency, trio.current_time()
        try:
            match await self._call("load_adapter", arguments):
                case {"error": str(message), "missing": True}:
                    error: Exception = AdapterNotFound(message, param="path")
                case {"error": str(message)}:
                    error = InvalidRequest(message, param="path")
                case {"checksum": str(checksum), "rank": int(rank)}:
                    residency.on_loaded(adapter.number, trio.current_time() - began)
                    if not held.checksum:
                        _log.info("adapter loaded", name=adapter.name, rank=rank)
                    held.checksum = checksum
                    held.settled.set()
                    return
                case answer:
                    error = EngineError(f"load_adapter: the worker answered {answer!r}")
        except EngineError as failure:
            error = failure
        residency.on_failed(adapter.number)
        self._fail(held, error)

    def _fail(self, held: HeldAdapter, error: Exception) -> None:
        """Report that an adapter can't be loaded, to its loader or the requests waiting for it."""
        if not held.settled.is_set():
            held.error = error
            held.settled.set()
            return
        name = held.adapter.name
        _log.error("adapter not loaded again", name=name, reason=str(error))
        failure = EngineError(f"the adapter {name!r} can't be loaded again: {error}")
        core = self._core()
        requests: dict[Request, None] = dict.fromkeys(
            each.sequence.request for each in core.waiting if each.adapter == held.adapter.number
        )
        for request in requests:
            self._deliver(core.finish_all(request, Finish(FinishReason.ERROR, error=failure)))

    def on_worker_lost(self, hang_reason: str) -> None:
        """Have the next worker load all adapters, except a new one that may have killed this
        worker.

        ``hang_reason`` is the reason why the worker counts as hung, if it does.
        """
        self._core().residency.on_worker_lost()
        held = self._held.get(self._loading)
        self._loading = 0
        if held is not None and not held.settled.is_set():
            why = f": {hang_reason}" if hang_reason else ""
            self._fail(held, WorkerLost(f"the worker was lost while it loaded the adapter{why}"))
