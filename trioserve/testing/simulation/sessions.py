"""Requests that are turns of sessions, and checks of each session's history.

A client's prompt is known only when it arrives, because it continues an earlier turn. So its
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
class _ExpectedSession:
    """A session and its expected turns: all tokens up to the end of each, by id, in order."""

    session: Session
    tokens: dict[str, list[int]] = attrs.field(factory=dict)

    @property
    def last(self) -> str | None:
        return next(reversed(self.tokens), None)


@attrs.define(eq=False)
class SessionChecker:
    """The sessions of one scenario, by number."""

    _sessions: dict[int, _ExpectedSession] = attrs.field(init=False, factory=dict)
    _parents: dict[int, str | None] = attrs.field(init=False, factory=dict)
    """The turn that each client's turn continues."""

    def begin(
        self, engine: Engine, visit: Visit, use: SessionUse, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        """Start the turn of a client that has arrived, and set its expected outputs."""
        expected = self._sessions.get(use.number)
        if expected is None or expected.session.is_closed:  # It may have timed out.
            timeout = math.inf if use.timeout is None else use.timeout
            expected = self._sessions[use.number] = _ExpectedSession(
                engine.sessions.open(f"session {use.number}", timeout=timeout)
            )
        client = visit.client
        parent = expected.last if use.how == "last" else None
        prefix = [] if parent is None else expected.tokens[parent]
        if use.offset is not None:
            prefix = prefix[: use.offset]
        self._parents[client.number] = parent
        generation = expected.session.generate(
            client.prompt,
            continuation=Continuation(
                anew=use.how == "scratch", replace=use.how == "replace", offset=use.offset
            ),
            **options,
        )
        visit.continue_from(prefix)
        return generation

    def note_chunk(self, visit: Visit, use: SessionUse) -> None:
        """Record a client's newest chunk; if it is the last one, the session keeps the turn."""
        if visit.chunks[0][-1].finish_reason not in ("stop", "length"):
            return
        number = visit.client.number
        expected, parent = self._sessions[use.number], self._parents[number]
        is_known = parent is None or parent in expected.tokens
        if is_known and not expected.session.is_closed:
            if use.how == "replace":
                expected.tokens.clear()
            output = [token for chunk in visit.chunks[0] for token in chunk.token_ids]
            expected.tokens[str(number)] = [*visit.prompt_ids, *output]

    def end(self, visit: Visit, use: SessionUse) -> None:
        """Check the session's turns after the client has left its block.

        Raises:
            Violation: The session's turns aren't those that ended with ``stop`` or ``length``.
        """
        if visit.client.number in self._parents:
            del self._parents[visit.client.number]
            self._check(self._sessions[use.number])

    def close(self) -> None:
        """Close all sessions."""
        for expected in self._sessions.values():
            expected.session.close()

    def _check(self, expected: _ExpectedSession) -> None:
        session = expected.session
        if session.is_closed:
            return
        if session.turns != list(expected.tokens):
            detail = f"{session.turns}, not {list(expected.tokens)}"
            raise Violation("a session keeps the turns that ended as they should", detail)
        for turn, tokens in expected.tokens.items():
            if session.tokens(turn) != tokens:
                detail = f"turn {turn}: {session.tokens(turn)}, not {tokens}"
                raise Violation("a session keeps the tokens of its turns", detail)
