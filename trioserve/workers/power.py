"""Sleep and wake of the worker. While it sleeps, there is no worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import trio

from trioserve.protocol.errors import WorkerLost


@attrs.define(eq=False)
class WorkerPower:
    """The on/off state of the worker, set by operators and read by the supervisor. On at first."""

    _wanted: trio.Event = attrs.field(init=False)
    """Set while a worker is wanted."""
    _gone: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set once the worker's process has ended."""
    _serving: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set while a worker serves."""
    _attached: trio.CancelScope | None = attrs.field(init=False, default=None)
    _ended: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._wanted = trio.Event()
        self._wanted.set()

    @property
    def is_on(self) -> bool:
        """True while a worker is wanted."""
        return self._wanted.is_set()

    async def turn_off(self) -> None:
        """End the worker's process; return once it has ended. Idempotent."""
        if self.is_on and not self._ended:
            self._wanted, self._gone = trio.Event(), trio.Event()
            if self._attached is not None:
                self._attached.cancel()
        await self._gone.wait()

    def turn_on(self) -> None:
        """Start a worker again. Idempotent."""
        self._wanted.set()

    async def wait_serving(self) -> None:
        """Block until a worker serves.

        Raises:
            WorkerLost: There are no workers any more.
        """
        while not self._serving.is_set():
            await self._serving.wait()
        if self._ended:
            raise WorkerLost("there are no workers any more")

    # ---- for the supervisor

    async def wait_on(self) -> None:
        """Block until a worker is wanted. Call this when there is none."""
        self._gone.set()
        await self._wanted.wait()

    @contextlib.contextmanager
    def wanted(self) -> Iterator[trio.CancelScope]:
        """Open a block that is cancelled when the worker is turned off."""
        with trio.CancelScope() as scope:
            self._attached = scope
            if not self.is_on:
                scope.cancel()
            try:
                yield scope
            finally:
                self._attached = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[trio.CancelScope]:
        """Open a block in which a worker serves; it is cancelled when the worker is turned off."""
        with self.wanted() as scope:
            self._serving.set()
            try:
                yield scope
            finally:
                self._serving = trio.Event()

    def end(self) -> None:
        """Note that there is no worker, and that none will start."""
        self._ended = True
        self._gone.set()
        self._serving.set()
