"""Sessions in the engine process, with turns from all front ends.

A front end makes a turn's request like any other. Before that it asks for the tokens from which the
turn goes on. Before its client gets the last chunk, the front end sends the turn to be kept. So the
next turn finds it, from any front end.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable

import attrs

from trioserve.engine.sessions.continuation import Beginning, Continuation, Said
from trioserve.engine.sessions.session import Session
from trioserve.engine.sessions.sessions import Sessions
from trioserve.front_ends.messages import TurnClosed, numbers_of, packed
from trioserve.protocol.errors import EngineError


@attrs.define(eq=False)
class FrontEndTurns:
    """The turns that one front end runs, in the engine process.

    Args:
        sessions: of all front ends.
        tell: sends the front end a message.
    """

    _sessions: Sessions
    _tell: Callable[[TurnClosed], None]
    _running: dict[int, tuple[Session, Beginning]] = attrs.field(init=False, factory=dict)
    """The running turns by the front end's own numbers."""

    async def begin_turn(
        self,
        number: int,
        session_id: str,
        owner: str | None,
        turn_id: str,
        continuation: Continuation,
    ) -> bytes:
        """Begin a turn; return the tokens that it goes on from, as a column."""
        if number in self._running:
            raise EngineError(f"there is a turn with the number {number}")
        session = self._sessions.find(session_id, owner)
        beginning = session.begin(turn_id, continuation)
        session.enter(beginning, functools.partial(self._tell, TurnClosed(number)))
        self._running[number] = session, beginning
        return packed(beginning.prefix)

    async def keep_turn(
        self, number: int, own: bytes, num_prompt_tokens: int, salt: str, adapter: int
    ) -> None:
        """Keep a turn that has ended as it should. Idempotent."""
        if number in self._running:
            session, beginning = self._running.pop(number)
            said = Said(
                own=array("i", numbers_of(own)),
                num_prompt_tokens=num_prompt_tokens,
                salt=salt,
                adapter=adapter,
            )
            session.keep(beginning, said)

    def leave(self, number: int) -> None:
        """Count a turn as running no more. Unless it was kept it leaves no trace. Idempotent."""
        if number in self._running:
            session, beginning = self._running.pop(number)
            session.leave(beginning)

    def leave_all(self) -> None:
        """End all turns, because the front end is gone."""
        for number in list(self._running):
            self.leave(number)
