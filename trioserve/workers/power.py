"""Whether there is to be a worker at all: it can be sent away for a while, with all its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import trio

from trioserve.protocol.errors import WorkerLost


@attrs.define(eq=False)
class WorkerPower:
    """Between whoever sends the worker away and the supervisor, which sees to it. On at first."""

    _wanted: trio.Event = attrs.field(init=False)
    """Set while there is to be a worker."""
    _gone: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set once there is none any more."""
    _there: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set while a worker serves."""
    _attached: trio.CancelScope | None = attrs.field(init=False, default=None)
    _ended: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._wanted = trio.Event()
        self._wanted.set()

    @property
    def is_on(self) -> bool:
        """Whether there is to be a worker."""
        return self._wanted.is_set()

    async def turn_off(self) -> None:
        """Send the worker away; return once its process has ended. Idempotent."""
        if self.is_on and not self._ended:
            self._wanted, self._gone = trio.Event(), trio.Event()
            if self._attached is not None:
                self._attached.cancel()
        await self._gone.wait()

    def turn_on(self) -> None:
        """Have a worker again, as soon as one has loaded. Idempotent."""
        self._wanted.set()

    async def wait_there(self) -> None:
        """Wait until a worker serves.

        Raises:
            WorkerLost: there will be none any more.
        """
        while not self._there.is_set():
            await self._there.wait()
        if self._ended:
            raise WorkerLost("there are no workers any more")

    # ---- for the supervisor

    async def wait_on(self) -> None:
        """Wait until there is to be a worker; there is none now."""
        self._gone.set()
        await self._wanted.wait()

    @contextlib.contextmanager
    def attached(self) -> Iterator[trio.CancelScope]:
        """A block in which a worker serves, cancelled when it is sent away."""
        with trio.CancelScope() as scope:
            self._attached = scope
            if not self.is_on:
                scope.cancel()
            self._there.set()
            try:
                yield scope
            finally:
                self._attached, self._there = None, trio.Event()

    def end(self) -> None:
        """There is no worker, and there will be none."""
        self._ended = True
        self._gone.set()
        self._there.set()
