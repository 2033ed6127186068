"""Responses that are kept in memory for later requests to name: bytes by id, within limits.

The caller decides the meaning of the bytes. A response may continue another one. The other's bytes
are then kept as long as its own, even if the other can no longer be named. So a conversation of
many turns is held once, not once for each turn.
"""

from __future__ import annotations

from typing import Protocol

import attrs

MAX_RESPONSES = 10_000
"""Responses that can be named."""
MAX_BYTES = 256 << 20
"""Bytes of all responses that are held."""
MAX_CONVERSATION_BYTES = 32 << 20
"""Bytes of a response and all that it continues, which are read together and sent in one message.
"""


class ResponseStore(Protocol):
    """The kept responses of a whole server, in whichever of its processes they are."""

    async def keep_response(
        self, owner: str | None, id: str, data: bytes, previous: str | None
    ) -> bool:
        """Keep a response as :meth:`KeptResponses.keep`."""

    async def kept_conversation(self, owner: str | None, id: str) -> list[bytes]:
        """Return a conversation as :meth:`KeptResponses.conversation`."""

    async def drop_response(self, owner: str | None, id: str) -> bool:
        """Drop a response as :meth:`KeptResponses.drop`."""


class LocalResponses:
    """A :class:`ResponseStore` in the process that has the responses."""

    __slots__ = ()

    responses: KeptResponses

    async def keep_response(
        self, owner: str | None, id: str, data: bytes, previous: str | None
    ) -> bool:
        """Keep a response as :meth:`KeptResponses.keep`."""
        return self.responses.keep(owner, id, data, previous)

    async def kept_conversation(self, owner: str | None, id: str) -> list[bytes]:
        """Return a conversation as :meth:`KeptResponses.conversation`."""
        return self.responses.conversation(owner, id)

    async def drop_response(self, owner: str | None, id: str) -> bool:
        """Drop a response as :meth:`KeptResponses.drop`."""
        return self.responses.drop(owner, id)


@attrs.define(eq=False)
class _Kept:
    """A response. ``holders`` are its own name and the responses that continue it."""

    data: bytes
    previous: _Kept | None
    num_bytes: int
    """Bytes of the conversation up to this response."""
    holders: int = 1


@attrs.define(eq=False)
class _Shelf:
    """The responses of one owner, in the order in which they were kept."""

    by_id: dict[str, _Kept] = attrs.field(factory=dict)
    num_bytes: int = 0
    """Bytes of all held responses, including those that can't be named."""


@attrs.define(eq=False)
class KeptResponses:
    """The responses of a server. Each belongs to an owner, and is visible to this owner only.

    Past a limit, the owner that holds the most loses its oldest response. So an owner that holds no
    more than an equal part of the limit loses nothing to the others.
    """

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    _shelves: dict[str | None, _Shelf] = attrs.field(factory=dict, init=False)
    """Shelves by owner, without empty ones."""

    def __len__(self) -> int:
        return sum(len(shelf.by_id) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all responses that are held."""
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def keep(self, owner: str | None, id: str, data: bytes, previous: str | None) -> bool:
        """Keep a response, in the place of one of the same id.

        Returns:
            whether it is kept: it isn't if the response that it continues is gone, or if its
                conversation is too
            large.
        """
        before = None if previous is None else self._find(owner, previous)
        if before is None and previous is not None:
            return False
        size = len(data) + (0 if before is None else before.num_bytes)
        if size > MAX_CONVERSATION_BYTES:
            return False
        if before is not None:
            before.holders += 1
        self.drop(owner, id)
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.by_id[id] = _Kept(data, before, size)
        shelf.num_bytes += len(data)
        while len(self) > self.max_responses:
            self._drop_oldest(max(self._shelves.items(), key=lambda item: len(item[1].by_id)))
        while self.num_bytes > self.max_bytes:
            self._drop_oldest(max(self._shelves.items(), key=lambda item: item[1].num_bytes))
        return True

    def conversation(self, owner: str | None, id: str) -> list[bytes]:
        """Return a response and all that it continues, the oldest first; empty if not kept."""
        found: list[bytes] = []
        kept = self._find(owner, id)
        while kept is not None:
            found.append(kept.data)
            kept = kept.previous
        return found[::-1]

    def drop(self, owner: str | None, id: str) -> bool:
        """Forget a response; return whether there was one."""
        shelf = self._shelves.get(owner)
        if shelf is None or id not in shelf.by_id:
            return False
        kept: _Kept | None = shelf.by_id.pop(id)
        while kept is not None:
            kept.holders -= 1
            if kept.holders:
                break
            shelf.num_bytes -= len(kept.data)
            kept = kept.previous
        if not shelf.by_id and not shelf.num_bytes:
            del self._shelves[owner]
        return True

    def _find(self, owner: str | None, id: str) -> _Kept | None:
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.by_id.get(id)

    def _drop_oldest(self, item: tuple[str | None, _Shelf]) -> None:
        owner, shelf = item
        self.drop(owner, next(iter(shelf.by_id)))

    def check_integrity(self) -> None:
        """Assert that all bytes are counted, and that the limits hold."""
        for shelf in self._shelves.values():
            _check_shelf(shelf)
        assert self.num_bytes <= self.max_bytes
        assert len(self) <= self.max_responses


def _check_shelf(shelf: _Shelf) -> None:
    assert shelf.by_id
    held: dict[_Kept, int] = {}
    for kept in shelf.by_id.values():
        held[kept] = held.get(kept, 0) + 1
    stack = list(held)
    while stack:
        before = stack.pop().previous
        if before is not None:
            if before not in held:
                stack.append(before)
            held[before] = held.get(before, 0) + 1
    assert all(kept.holders == count for kept, count in held.items())
    assert shelf.num_bytes == sum(len(kept.data) for kept in held)
