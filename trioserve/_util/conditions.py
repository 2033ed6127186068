"""Conditions that tasks wait for and other tasks bring about."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio


@attrs.define(eq=False)
class Conditions:
    """The conditions that tasks wait for."""

    _awaited: dict[trio.Event, Callable[[], bool]] = attrs.field(init=False, factory=dict)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Block until ``condition`` holds. It is checked now and at every :meth:`notify`."""
        event = trio.Event()
        self._awaited[event] = condition
        try:
            self.notify()
            await event.wait()
        finally:
            del self._awaited[event]

    def notify(self) -> None:
        """Check all conditions after a change of the state. Cheap while no task waits."""
        for event, condition in list(self._awaited.items()):
            if condition():
                event.set()
