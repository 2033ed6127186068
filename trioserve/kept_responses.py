"""Responses that are kept in memory for later requests to name: bytes by id, within limits.

What the bytes say is their keeper's business. A response may go on from another one: then the bytes
of that are kept for as long as its own, whether or not it can still be named. So a conversation of
many turns is held once, not once for each turn.
"""

from __future__ import annotations

import attrs

__all__ = ["MAX_BYTES", "MAX_CONVERSATION_BYTES", "MAX_RESPONSES", "KeptResponses"]

MAX_RESPONSES = 10_000
"""Responses that can be named."""
MAX_BYTES = 256 << 20
"""Of all responses that are held."""
MAX_CONVERSATION_BYTES = 32 << 20
"""Of a response and all that it goes on from, which are read together, and sent in one message."""


@attrs.define(eq=False)
class _Kept:
    """A response. ``holders`` are its own name and the responses that go on from it."""

    data: bytes
    previous: _Kept | None
    num_bytes: int
    """Of the conversation up to here."""
    holders: int = 1


@attrs.define(eq=False)
class KeptResponses:
    """The responses of a server. Each belongs to an owner, to whom alone it is there.

    Past a limit, those that were kept first go first.
    """

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    num_bytes: int = attrs.field(default=0, init=False)
    """Of all that are held, those that can't be named among them."""
    _by_name: dict[tuple[str | None, str], _Kept] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._by_name)

    def keep(self, owner: str | None, id: str, data: bytes, previous: str | None) -> bool:
        """Keep a response, in the place of one of the same id.

        Returns:
            whether it is kept: it isn't if it goes on from a response that is no longer there, or
            makes its conversation too large.
        """
        before = None if previous is None else self._by_name.get((owner, previous))
        if before is None and previous is not None:
            return False
        size = len(data) + (0 if before is None else before.num_bytes)
        if size > MAX_CONVERSATION_BYTES:
            return False
        if before is not None:
            before.holders += 1
        self.drop(owner, id)
        self._by_name[owner, id] = _Kept(data, before, size)
        self.num_bytes += len(data)
        while len(self) > self.max_responses or self.num_bytes > self.max_bytes:
            self._release(self._by_name.pop(next(iter(self._by_name))))
        return True

    def conversation(self, owner: str | None, id: str) -> list[bytes]:
        """A response behind all that it goes on from, in their order; empty if there is none."""
        found: list[bytes] = []
        kept = self._by_name.get((owner, id))
        while kept is not None:
            found.append(kept.data)
            kept = kept.previous
        return found[::-1]

    def drop(self, owner: str | None, id: str) -> bool:
        """Forget a response; whether there was one."""
        kept = self._by_name.pop((owner, id), None)
        self._release(kept)
        return kept is not None

    def _release(self, kept: _Kept | None) -> None:
        """One holder less."""
        while kept is not None:
            kept.holders -= 1
            if kept.holders:
                return
            self.num_bytes -= len(kept.data)
            kept = kept.previous

    def check_integrity(self) -> None:
        """Assert that all bytes are counted, and that the limits hold."""
        held: dict[_Kept, int] = {}
        for kept in self._by_name.values():
            held[kept] = held.get(kept, 0) + 1
        stack = list(held)
        while stack:
            before = stack.pop().previous
            if before is not None:
                if before not in held:
                    stack.append(before)
                held[before] = held.get(before, 0) + 1
        assert all(kept.holders == count for kept, count in held.items())
        assert self.num_bytes == sum(len(kept.data) for kept in held)
        assert self.num_bytes <= self.max_bytes
        assert len(self) <= self.max_responses
