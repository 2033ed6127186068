"""Adapters that are loaded and unloaded while clients use them, and a record of which are there.

A load makes an adapter known. Requests may name it from the end of that call until the unload
begins, and it is gone when the unload ends. Each load of a name has a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve.engine.engine import Engine
from trioserve.protocol.errors import AdapterNotFound, InvalidRequest, TrioserveError, WorkerLost
from trioserve.testing.simulation.scenario import AdapterChange
from trioserve.testing.simulation.trace import Trace, Violation

PATIENCE = 5.0
"""Seconds that a client waits for an adapter before it requests it anyway."""


@attrs.define(eq=False)
class _Load:
    number: int
    path: str
    is_there: bool = False
    is_leaving: bool = False
    is_gone: bool = False


@attrs.define(eq=False)
class AdapterBooks:
    """The adapters of one scenario.

    Args:
        trace: gets the events.
        may_lose_workers: whether a load may fail with the worker.
    """

    _trace: Trace
    _may_lose_workers: Callable[[], bool]
    num_open: int = attrs.field(init=False, default=0)
    """Loads and unloads in progress."""
    _num_loads: int = attrs.field(init=False, default=0)
    _by_name: dict[str, _Load] = attrs.field(init=False, factory=dict)
    _of_client: dict[int, _Load] = attrs.field(init=False, factory=dict)
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def change(self, engine: Engine, change: AdapterChange) -> None:
        """Carry out ``change`` at its time.

        Raises:
            Violation: it doesn't end as it must.
        """
        await trio.sleep(change.at)
        self._trace.note(f"{change.what} adapter {change.name} {change.path}")
        self.num_open += 1
        if change.what == "load":
            await self._load(engine, change)
        else:
            await self._unload(engine, change.name)
        self.num_open -= 1
        self._trace.note(f"end of {change.what} adapter {change.name} {change.path}")

    async def unload_all(self, engine: Engine) -> None:
        """Unload every adapter."""
        for name in list(self._by_name):
            await self._unload(engine, name)

    async def _load(self, engine: Engine, change: AdapterChange) -> None:
        load = None
        if change.name not in self._by_name:
            self._num_loads += 1
            load = self._by_name[change.name] = _Load(self._num_loads, change.path)
        must_fail = load is None or change.is_bad
        try:
            await engine.load_adapter(change.name, change.path)
        except TrioserveError as error:
            if load is not None:
                del self._by_name[change.name]
            is_due = isinstance(error, InvalidRequest) and must_fail
            is_lost = isinstance(error, WorkerLost) and self._may_lose_workers()
            if not (is_due or is_lost):
                raise Violation("an adapter that is in order is loaded", repr(error)) from error
            return
        if load is None or must_fail:
            raise Violation("an adapter that can't be served is refused", change.path)
        load.is_there = True
        self._changed.set()
        self._changed = trio.Event()

    async def _unload(self, engine: Engine, name: str) -> None:
        load = self._there(name)
        if load is not None:
            load.is_leaving = True
            del self._by_name[name]
        try:
            await engine.unload_adapter(name)
        except AdapterNotFound as error:
            if load is not None:
                raise Violation("an adapter that is there can be unloaded", name) from error
            return
        if load is None:
            raise Violation("an adapter that isn't there can't be unloaded", name)
        load.is_gone = True

    def _there(self, name: str) -> _Load | None:
        load = self._by_name.get(name)
        return load if load is not None and load.is_there else None

    async def wait_for(self, name: str) -> None:
        """Wait until requests may name the adapter, up to :data:`PATIENCE`."""
        with trio.move_on_after(PATIENCE):
            while self._there(name) is None:
                await self._changed.wait()

    def begin(self, client: int, name: str) -> str:
        """Record that a client is about to name an adapter; return the adapter's path, ""
        for none.
        """
        load = self._there(name)
        if load is None:
            return ""
        self._of_client[client] = load
        return load.path

    def key_of(self, client: int) -> int:
        """Return a number that is equal for clients with the same load of an adapter, 0 for
        none.
        """
        load = self._of_client.get(client)
        return 0 if load is None else load.number

    def is_gone(self, client: int) -> bool:
        """Return whether the adapter of a client's request was unloaded, and that call has
        ended.
        """
        load = self._of_client.get(client)
        return load is not None and load.is_gone

    def may_be_missed(self, client: int, name: str) -> bool:
        """Return whether a client may get the error that its adapter isn't there."""
        load = self._of_client.get(client)
        return bool(name) and (self._there(name) is None if load is None else load.is_leaving)
