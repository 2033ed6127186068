"""The history of a session: a tree of turns, each of which goes on from another one. Sans-IO.

A turn is a prompt and its output. It keeps the tokens that it added. Before them come the first
``cut`` tokens of the turn that it goes on from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import attrs


@attrs.define(eq=False)
class SessionTurn:
    """One turn that has ended as it should."""

    id: str
    parent: SessionTurn | None = attrs.field(repr=False)
    cut: int
    """The number of the parent's tokens before its own."""
    own: array[int] = attrs.field(repr=False)
    """The tokens of its prompt and its output."""
    num_prompt_tokens: int
    """The number of its own tokens that belong to the prompt."""
    salt: str = ""
    adapter: int = 0
    """Salt and adapter of the request, under which the prefix cache has its KV."""
    children: dict[SessionTurn, None] = attrs.field(init=False, factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """All tokens up to its end."""
        return self.cut + len(self.own)

    @property
    def is_covered(self) -> bool:
        """True if another turn goes on from its very end."""
        return any(child.cut == self.num_tokens for child in self.children)

    def tokens(self) -> list[int]:
        """Return all tokens up to its end, from the session's beginning."""
        parts: list[array[int]] = []
        turn: SessionTurn | None = self
        stop = self.num_tokens
        while turn is not None:
            if stop > turn.cut:
                parts.append(turn.own[: stop - turn.cut])
            stop = min(stop, turn.cut)
            turn = turn.parent
        # Whole arrays at a time: there may be a hundred thousand tokens.
        whole = array("i")
        for part in reversed(parts):
            whole.extend(part)
        return whole.tolist()


@attrs.define(eq=False)
class Turns:
    """The turns of one session."""

    _by_id: dict[str, SessionTurn] = attrs.field(init=False, factory=dict)
    last: SessionTurn | None = attrs.field(init=False, default=None)
    """The turn that was added last."""
    num_tokens: int = attrs.field(init=False, default=0)
    """The tokens of all turns."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[SessionTurn]:
        return iter(list(self._by_id.values()))

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def get(self, id: str) -> SessionTurn | None:
        """Return the turn of that id."""
        return self._by_id.get(id)

    def add(self, turn: SessionTurn) -> None:
        """Add ``turn``. Its parent, if it has one, is in the tree, and its id is not."""
        assert turn.id not in self._by_id
        if turn.parent is not None:
            assert self._by_id[turn.parent.id] is turn.parent
            turn.parent.children[turn] = None
        self._by_id[turn.id] = turn
        self.num_tokens += len(turn.own)
        self.last = turn

    def remove(self, turns: Iterable[SessionTurn]) -> list[SessionTurn]:
        """Remove ``turns`` and all that go on from them; return the removed ones."""
        removed: list[SessionTurn] = []
        stack = list(turns)
        while stack:
            turn = stack.pop()
            if self._by_id.get(turn.id) is not turn:
                continue
            del self._by_id[turn.id]
            self.num_tokens -= len(turn.own)
            removed.append(turn)
            stack.extend(turn.children)
            if turn.parent is not None:
                turn.parent.children.pop(turn, None)
        if self.last is not None and self.last.id not in self._by_id:
            self.last = next(reversed(self._by_id.values()), None)
        return removed

    def check_integrity(self) -> None:
        """Assert that the tree is one, and that its tokens are counted."""
        assert self.num_tokens == sum(len(turn.own) for turn in self)
        for id, turn in self._by_id.items():
            assert turn.id == id
            if turn.parent is not None:
                assert turn in turn.parent.children
                assert self._by_id[turn.parent.id] is turn.parent
                assert 0 <= turn.cut <= turn.parent.num_tokens
            assert all(self._by_id[child.id] is child for child in turn.children)
        assert (self.last is None) == (not self._by_id)
