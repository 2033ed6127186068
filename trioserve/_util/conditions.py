"""Waiting for something to have happened that somebody else's steps bring about."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio


@attrs.define(eq=False)
class Happenings:
    """What tasks wait for, each with what tells whether it has happened."""

    _awaited: dict[trio.Event, Callable[[], bool]] = attrs.field(init=False, factory=dict)

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until ``happened`` is true when :meth:`look` is called, or already is."""
        event = trio.Event()
        self._awaited[event] = happened
        try:
            self.look()
            await event.wait()
        finally:
            del self._awaited[event]

    def look(self) -> None:
        """Something may have happened. Cheap while nobody waits."""
        for event, happened in list(self._awaited.items()):
            if happened():
                event.set()
