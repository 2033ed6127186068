"""The open sessions of an engine: their number, their owners, and their end after a timeout."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

import trio

from trioserve.engine.sessions.continuation import Generate
from trioserve.engine.sessions.session import MAX_CAPACITY, Session
from trioserve.protocol.errors import EngineError, InvalidRequest, RequestAborted, SessionLimit
from trioserve.requests.request import Request
from trioserve.requests.tenants import excess
from trioserve.scheduler.prefix_pins import PrefixPins

MAX_ID_CHARACTERS = 256


def _elsewhere(*_: object, **__: object) -> NoReturn:
    raise AssertionError("requests are made in front ends")


class Sessions:
    """The open sessions of one engine.

    Args:
        pins: of the engine's schedulers; they keep the pages of histories.
        max_sessions: how many may be open.
        generate: the engine's, where there is one.
        end: ends a turn that runs, with an error.
    """

    def __init__(
        self,
        pins: PrefixPins,
        max_sessions: int,
        generate: Generate = _elsewhere,
        end: Callable[[Request, RequestAborted], None] = _elsewhere,
    ) -> None:
        self.generate = generate
        self.end = end
        self.pins = pins
        """Keeps the pages of histories."""
        self._max_sessions = max_sessions
        self._open: dict[tuple[str | None, str], Session] = {}
        """By owner and id."""
        self._num_opened = 0
        self.start_task: Callable[[Callable[[], Any]], None] | None = None
        """Starts a task that lives as long as the engine."""
        self._has_task = False
        self._closed: EngineError | None = None
        self._alarm = trio.CancelScope()
        """Ends when the next session is to be closed."""

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        id: str | None = None,
        *,
        capacity: int = MAX_CAPACITY,
        timeout: float = math.inf,
        owner: str | None = None,
        tenant: str = "",
        goes_on: bool = True,
    ) -> Session:
        """Open a session until it is closed: :meth:`trioserve.Engine.open_session` is a block.

        Args:
            id: see there.
            capacity: see there.
            timeout: see there.
            owner: a name without which the session isn't found.
            tenant: the name under which its share of all sessions counts; empty for none.
            goes_on: see :class:`Session`.

        Raises:
            InvalidRequest: an argument is wrong, or there is a session of that id.
            SessionLimit: as many sessions are open as may be.
            EngineError: the engine is closed.
        """
        if self._closed is not None:
            raise self._closed
        id = id or f"session-{uuid.uuid4().hex}"
        if len(id) > MAX_ID_CHARACTERS:
            raise InvalidRequest(
                f"session_id has {len(id)} characters; at most {MAX_ID_CHARACTERS} are served",
                param="session_id",
            )
        if not 1 <= capacity <= MAX_CAPACITY:
            raise InvalidRequest(
                f"capacity must be from 1 to {MAX_CAPACITY}, got {capacity}", param="capacity"
            )
        if not timeout > 0:
            raise InvalidRequest(f"timeout must be positive, got {timeout}", param="timeout")
        if (owner, id) in self._open:
            raise InvalidRequest(f"there is a session {id!r} already", param="session_id")
        if len(self._open) >= self._max_sessions:
            raise SessionLimit(
                f"{len(self._open)} sessions are open; that is the limit (--max-sessions)"
            )
        own = sum(each.tenant == tenant for each in self._open.values()) if tenant else 0
        if excess(own, 1, len(self._open) - own, self._max_sessions) > 0:
            raise SessionLimit(
                f"{own} sessions of this key are open; a key may have half of those that other "
                "keys leave (--max-sessions)"
            )
        self._num_opened += 1
        name = f"session {self._num_opened}"
        session = Session(id, capacity, timeout, owner, tenant, goes_on, name, self)
        self._open[owner, id] = session
        session.touch()
        if timeout < math.inf and not self._has_task and self.start_task is not None:
            self._has_task = True
            self.start_task(self._run)
        return session

    def close(self, error: EngineError) -> None:
        """Refuse to open sessions from now on, with ``error``."""
        self._closed = error

    def find(self, id: str, owner: str | None = None) -> Session:
        """Return the open session of that id.

        Raises:
            InvalidRequest: there is none, or it has another owner.
        """
        session = self._open.get((owner, id))
        if session is None:
            raise InvalidRequest(
                f"there is no session {id!r}; it may have been closed, or timed out",
                param="session_id",
                code="session_not_found",
            )
        return session

    async def _run(self) -> None:
        """Close sessions when their time is over. This is a task."""
        while True:
            with trio.CancelScope(deadline=self._next_deadline()) as self._alarm:
                await trio.sleep_forever()
            now = trio.current_time()
            for session in list(self._open.values()):
                if session.deadline <= now:
                    session.close()

    def _next_deadline(self) -> float:
        return min((session.deadline for session in self._open.values()), default=math.inf)

    def on_touched(self) -> None:
        """Follow a session's new deadline."""
        self._alarm.deadline = self._next_deadline()

    def on_closed(self, session: Session) -> None:
        """Forget ``session``, which is closed."""
        del self._open[session.owner, session.id]

    def check_integrity(self) -> None:
        """Assert the invariants of each session and of the pins of all."""
        for session in self._open.values():
            session.check_integrity()
        assert len(self._open) <= self._max_sessions
        names = {name for each in self._open.values() for name in each.hold_names()}
        assert self.pins.names() <= names, "pages are kept for a session that is closed"
