"""Adapters that are loaded and unloaded while clients use them, and checks of these calls.

Requests may name an adapter from the end of its load until its unload begins. It is gone when the
unload ends. Each load of a name has its own number.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve.engine.engine import Engine
from trioserve.protocol.errors import AdapterNotFound, InvalidRequest, TrioserveError, WorkerLost
from trioserve.testing.simulation.scenario import AdapterChange
from trioserve.testing.simulation.trace import Trace, Violation

MAX_WAIT = 5.0
"""Seconds that a client waits for its adapter; then it sends its request anyway."""


@attrs.define(eq=False)
class _Load:
    number: int
    path: str
    is_loaded: bool = False
    is_unloading: bool = False
    is_unloaded: bool = False


@attrs.define(eq=False)
class AdapterChecker:
    """The adapters of one scenario.

    Args:
        trace: Takes the events.
        may_lose_workers: Returns True if a load may fail because its worker is lost.
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
        """Wait until the time of ``change``, then carry it out.

        Raises:
            Violation: It didn't end as expected.
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
                raise Violation("a valid adapter is loaded", repr(error)) from error
            return
        if load is None or must_fail:
            raise Violation("an adapter that can't be served is refused", change.path)
        load.is_loaded = True
        self._changed.set()
        self._changed = trio.Event()

    async def _unload(self, engine: Engine, name: str) -> None:
        load = self._loaded(name)
        if load is not None:
            load.is_unloading = True
            del self._by_name[name]
        try:
            await engine.unload_adapter(name)
        except AdapterNotFound as error:
            if load is not None:
                raise Violation("a loaded adapter can be unloaded", name) from error
            return
        if load is None:
            raise Violation("an adapter that isn't loaded can't be unloaded", name)
        load.is_unloaded = True

    def _loaded(self, name: str) -> _Load | None:
        load = self._by_name.get(name)
        return load if load is not None and load.is_loaded else None

    async def wait_for(self, name: str) -> None:
        """Wait until requests may name the adapter, up to :data:`MAX_WAIT`."""
        with trio.move_on_after(MAX_WAIT):
            while self._loaded(name) is None:
                await self._changed.wait()

    def begin(self, client: int, name: str) -> str:
        """Record that a client is about to name an adapter.

        Returns:
            The adapter's path; "" if it isn't loaded.
        """
        load = self._loaded(name)
        if load is None:
            return ""
        self._of_client[client] = load
        return load.path

    def key_of(self, client: int) -> int:
        """Return the number of the load that the client uses; 0 for none."""
        load = self._of_client.get(client)
        return 0 if load is None else load.number

    def is_gone(self, client: int) -> bool:
        """Return True if the unload of the client's adapter has ended."""
        load = self._of_client.get(client)
        return load is not None and load.is_unloaded

    def may_be_missing(self, client: int, name: str) -> bool:
        """Return True if a client may get the error that its adapter isn't loaded."""
        load = self._of_client.get(client)
        return bool(name) and (self._loaded(name) is None if load is None else load.is_unloading)
