"""Sessions as front ends use them: they are in the engine process, whoever brings the next turn.

A turn's request is made in a front end like any other; before it the front end asks where the turn
goes on from, and before its client gets the last of it, the front end says what was said. So the
next turn, over whichever front end it comes, finds it.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from trioserve.engine.sessions.continuation import Beginning, Continuation, Said
from trioserve.engine.sessions.sessions import Session, Sessions
from trioserve.front_ends.messages import TurnClosed, numbers_of, packed
from trioserve.front_ends.rpc import Handlers


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
    """By the front end's own numbers."""

    @property
    def handlers(self) -> Handlers:
        """What the front end may ask."""
        return {
            "open_session": self._open_session,
            "close_session": self._close_session,
            "begin_turn": self._begin,
            "keep_turn": self._keep,
        }

    async def _open_session(self, arguments: Any) -> str:
        id, capacity, timeout, owner, tenant, goes_on = arguments
        session = self._sessions.open(
            id, capacity=capacity, timeout=timeout, owner=owner, tenant=tenant, goes_on=goes_on
        )
        return session.id

    async def _close_session(self, arguments: Any) -> None:
        id, owner = arguments
        self._sessions.find(id, owner).close()

    async def _begin(self, arguments: Any) -> bytes:
        """A turn runs from now on; the tokens that it goes on from, as a column."""
        number, session_id, owner, turn_id, continuation = arguments
        session = self._sessions.find(session_id, owner)
        beginning = session.begin(turn_id, msgspec.convert(continuation, Continuation))
        session.enter(beginning, functools.partial(self._tell, TurnClosed(number)))
        self._running[number] = session, beginning
        return packed(beginning.prefix)

    async def _keep(self, arguments: Any) -> None:
        """A turn has ended as it should. It may have been kept before, and asked for again."""
        number, own, num_prompt_tokens, salt, adapter = arguments
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
        """A turn runs no more; if it wasn't kept it leaves no trace. Idempotent."""
        if number in self._running:
            session, beginning = self._running.pop(number)
            session.leave(beginning)

    def leave_all(self) -> None:
        """The front end is gone."""
        for number in list(self._running):
            self.leave(number)
