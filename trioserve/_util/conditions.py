"""Waiting for something to have happened that somebody else's steps bring about."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio


@attrs.define(eq=False)
class Conditions:
    """What tasks wait for, each with what tells whether it has happened."""

    _awaited: dict[trio.Event, Callable[[], bool]] = attrs.field(init=False, factory=dict)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true when :meth:`notify` is called, or already is."""
        event = trio.Event()
        self._awaited[event] = condition
        try:
            self.notify()
            await event.wait()
        finally:
            del self._awaited[event]

    def notify(self) -> None:
        """Something may have happened. Cheap while nobody waits."""
        for event, condition in list(self._awaited.items()):
            if condition():
                event.set()
