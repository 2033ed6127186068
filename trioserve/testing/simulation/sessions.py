"""Clients with turns of sessions as requests, and the expected history of each session.

A client's prompt is known only at its arrival, as it continues a turn that ended before. So its
expected outputs are computed then.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import attrs

from trioserve.engine.engine import Engine
from trioserve.engine.sessions.continuation import Continuation
from trioserve.engine.sessions.session import Session
from trioserve.requests.generation import GenerationStream
from trioserve.testing.simulation.judge import Visit
from trioserve.testing.simulation.scenario import SessionUse
from trioserve.testing.simulation.trace import Violation


@attrs.define(eq=False)
class _Book:
    """A session, and all tokens up to the end of each of its turns, by the turns' ids, in order."""

    session: Session
    tokens: dict[str, list[int]] = attrs.field(factory=dict)

    @property
    def last(self) -> str | None:
        return next(reversed(self.tokens), None)


@attrs.define(eq=False)
class SessionBooks:
    """The sessions of one scenario, by number."""

    _books: dict[int, _Book] = attrs.field(init=False, factory=dict)
    _parents: dict[int, str | None] = attrs.field(init=False, factory=dict)
    """The turn that each client's turn continues."""

    def begin(
        self, engine: Engine, visit: Visit, use: SessionUse, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        """Start the turn of an arrived client, and tell it the expected outputs."""
        book = self._books.get(use.number)
        if book is None or book.session.is_closed:  # it may have timed out
            timeout = math.inf if use.timeout is None else use.timeout
            book = self._books[use.number] = _Book(
                engine.sessions.open(f"session {use.number}", timeout=timeout)
            )
        client = visit.client
        parent = book.last if use.how == "last" else None
        prefix = [] if parent is None else book.tokens[parent]
        if use.offset is not None:
            prefix = prefix[: use.offset]
        self._parents[client.number] = parent
        generation = book.session.generate(
            client.prompt,
            continuation=Continuation(
                anew=use.how == "anew", replace=use.how == "replace", offset=use.offset
            ),
            **options,
        )
        visit.go_on_from(prefix)
        return generation

    def note_chunk(self, visit: Visit, use: SessionUse) -> None:
        """Record a client's chunk; a turn is kept if this was its last chunk."""
        if visit.chunks[0][-1].finish_reason not in ("stop", "length"):
            return
        number = visit.client.number
        book, parent = self._books[use.number], self._parents[number]
        is_there = parent is None or parent in book.tokens
        if is_there and not book.session.is_closed:
            if use.how == "replace":
                book.tokens.clear()
            output = [token for chunk in visit.chunks[0] for token in chunk.token_ids]
            book.tokens[str(number)] = [*visit.prompt_ids, *output]

    def end(self, visit: Visit, use: SessionUse) -> None:
        """Check the session's turns after the client has left its block.

        Raises:
            Violation: its session has other turns than those that ended well.
        """
        if visit.client.number in self._parents:
            del self._parents[visit.client.number]
            self._check(self._books[use.number])

    def close(self) -> None:
        """Close all sessions."""
        for book in self._books.values():
            book.session.close()

    def _check(self, book: _Book) -> None:
        session = book.session
        if session.is_closed:
            return
        if session.turns != list(book.tokens):
            detail = f"{session.turns}, not {list(book.tokens)}"
            raise Violation("a session keeps the turns that ended as they should", detail)
        for turn, tokens in book.tokens.items():
            if session.tokens(turn) != tokens:
                detail = f"turn {turn}: {session.tokens(turn)}, not {tokens}"
                raise Violation("a session keeps the tokens of its turns", detail)
