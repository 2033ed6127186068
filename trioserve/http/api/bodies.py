"""The bodies of requests until they have been parsed: all of them together have a limit, too.

One body has ``max_body_size``. Many clients who send large ones slowly would hold that much each.
Where there is no room for what comes, a body that is still being received makes way: the oldest one
of the address whose bodies hold the most (:mod:`~.holdings`). So a slow body has its room for as
long as no other body needs it. Bodies that have come whole, and are being read, keep theirs.
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
    """How many bytes of bodies are held, and how many may be."""

    size: int
    held: int = 0
    _receiving: Holdings[Body] = attrs.field(init=False, factory=Holdings)
    """Those of bodies that are being received."""

    @classmethod
    def for_bodies_of(cls, max_body_size: int) -> BodyBudget:
        """Room for several bodies of that size."""
        return cls(max(_ROOM, 4 * max_body_size))

    def take(self, body: Body, num_bytes: int) -> bool:
        """Count so many bytes more of ``body``; return False if there is no room for them."""
        while self.held + num_bytes > self.size:
            first = self._receiving.first_to_go()
            if first is None or first is body:
                return False
            first.refuse()
        self.held += num_bytes
        self._receiving.add(body.address, body, num_bytes)
        return True

    def note_complete(self, body: Body) -> None:
        """Keep the room of ``body``, which has come whole, for as long as it takes to read it."""
        self._receiving.remove(body)

    def give_back(self, body: Body, num_bytes: int) -> None:
        """Forget ``body``, which holds so many bytes."""
        self._receiving.remove(body)
        self.held -= num_bytes


class Body(TrioBody):
    """A body that takes its part of the room until it has been parsed, or its request has ended.

    It may lose its room while it is being received.
    """

    room: BodyBudget
    address: str = ""
    """The client's, as its bodies are counted together."""

    is_refused = False
    """Whether it was ended for want of room."""
    _held = 0

    def append(self, data: bytes) -> None:
        """Take what came, if there is room; the rest of a body that was refused goes nowhere."""
        if self.is_refused or not data:
            return
        if not self.room.take(self, len(data)):
            self.refuse()
            return
        self._held += len(data)
        super().append(data)

    def refuse(self) -> None:
        """End the body, whose room is needed, before it has come whole."""
        self.is_refused = True
        self.release()
        self.set_complete()

    def set_complete(self) -> None:
        """Note that nothing more will come."""
        self.room.note_complete(self)
        super().set_complete()

    def __await__(self) -> Generator[Any, None, Any]:
        """The whole body.

        Raises:
            QueueFull: there is no room for it among those of others, or they needed its room.
        """
        body = yield from super().__await__()
        if self.is_refused:
            raise QueueFull(
                f"too many bodies of requests are being received; together they have "
                f"{self.room.size} bytes, and the oldest of a client makes way"
            )
        return body

    def release(self) -> None:
        """Forget what came, and give its room back."""
        self.clear()
        self.room.give_back(self, self._held)
        self._held = 0
