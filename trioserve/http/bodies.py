"""The bodies of requests until they have been parsed: all of them together have a limit, too.

One body has ``max_body_size``. Many clients who send large ones slowly would hold that much each.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs
from quart_trio.wrappers.request import TrioBody

from trioserve.errors import QueueFull

__all__ = ["Body", "BodyRoom"]

_ROOM = 256 << 20


@attrs.define
class BodyRoom:
    """How many bytes of bodies are held, and how many may be."""

    size: int
    held: int = 0

    @classmethod
    def for_bodies_of(cls, max_body_size: int) -> BodyRoom:
        """Room for several bodies of that size."""
        return cls(max(_ROOM, 4 * max_body_size))


class Body(TrioBody):
    """A body that takes its part of the room until it has been parsed, or its request has ended."""

    room: BodyRoom

    _held = 0
    _refused = False

    def append(self, data: bytes) -> None:
        """Take what came, if there is room; the rest of a body that was refused goes nowhere."""
        if self._refused:
            return
        if self.room.held + len(data) > self.room.size:
            self._refused = True
            self.release()
            self.set_complete()
            return
        self.room.held += len(data)
        self._held += len(data)
        super().append(data)

    def __await__(self) -> Generator[Any, None, Any]:
        """The whole body.

        Raises:
            QueueFull: there is no room for it among those of others.
        """
        body = yield from super().__await__()
        if self._refused:
            raise QueueFull("too many bodies of requests are being received")
        return body

    def release(self) -> None:
        """Forget what came, and give its room back."""
        self.clear()
        self.room.held -= self._held
        self._held = 0
