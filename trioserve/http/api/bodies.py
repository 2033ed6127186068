"""Request bodies until they have been parsed, with one memory limit for all of them.

One body is limited by ``max_body_size``. Many clients that send large bodies slowly would each hold
that much. If there is no room for more bytes, a body that is still being received is refused: the
oldest one of the address that holds the most (:mod:`~.holdings`). So a slow body keeps its room
until another body needs it. Complete bodies that are being read keep theirs.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs
from quart_trio.wrappers.request import TrioBody

from trioserve.http.server.holdings import Holdings
from trioserve.protocol.errors import QueueFull

_ROOM = 256 << 20


@attrs.define(eq=False)
class BodyBudget:
    """Budget of the bytes that bodies hold."""

    size: int
    held: int = 0
    _receiving: Holdings[Body] = attrs.field(init=False, factory=Holdings)
    """Holdings of the bodies that are being received."""

    @classmethod
    def for_bodies_of(cls, max_body_size: int) -> BodyBudget:
        """Return a budget for several bodies of that size."""
        return cls(max(_ROOM, 4 * max_body_size))

    def take(self, body: Body, num_bytes: int) -> bool:
        """Count ``num_bytes`` more of ``body``; return False if there is no room for them."""
        while self.held + num_bytes > self.size:
            first = self._receiving.first_to_go()
            if first is None or first is body:
                return False
            first.refuse()
        self.held += num_bytes
        self._receiving.add(body.address, body, num_bytes)
        return True

    def note_complete(self, body: Body) -> None:
        """Keep the room of ``body``, which is complete, until it has been parsed."""
        self._receiving.remove(body)

    def give_back(self, body: Body, num_bytes: int) -> None:
        """Subtract ``num_bytes``, which ``body`` holds, and forget it."""
        self._receiving.remove(body)
        self.held -= num_bytes


class Body(TrioBody):
    """Body that counts in the budget until it has been parsed, or its request has ended.

    It may lose its room while it is being received.
    """

    room: BodyBudget
    address: str = ""
    """Address of the client, under which its bodies are counted."""

    is_refused = False
    """True if it was refused for lack of room."""
    _held = 0

    def append(self, data: bytes) -> None:
        """Append received bytes, if there is room; drop the rest of a refused body."""
        if self.is_refused or not data:
            return
        if not self.room.take(self, len(data)):
            self.refuse()
            return
        self._held += len(data)
        super().append(data)

    def refuse(self) -> None:
        """Refuse the body before it is complete, because its room is needed."""
        self.is_refused = True
        self.release()
        self.set_complete()

    def set_complete(self) -> None:
        """Note that nothing more will come."""
        self.room.note_complete(self)
        super().set_complete()

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the whole body, and return it.

        Raises:
            QueueFull: there was no room for it, or another body needed its room.
        """
        body = yield from super().__await__()
        if self.is_refused:
            raise QueueFull(
                "too many bodies of requests are being received; together they have "
                f"{self.room.size} bytes, and the oldest of a client makes way"
            )
        return body

    def release(self) -> None:
        """Drop the received bytes, and give their room back."""
        self.clear()
        self.room.give_back(self, self._held)
        self._held = 0
