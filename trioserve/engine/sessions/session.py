"""A session: a conversation with remembered turns and kept KV.

A turn is a request. Its prompt is the history, as tokens, and the new part. It joins the history
when it has ended as it should and its reader gets the last chunk. A turn that was cut off leaves no
trace, and the next turn goes on from before it. The prefix cache finds computed pages. A pin on
each end of the history raises their priority, so a session owns no page, and nothing can leak.

Turns that run at the same time are branches: each goes on from the turns that had ended when it
began.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import attrs
import trio

from trioserve.engine.sessions.continuation import (
    AFTER_THE_LAST,
    Beginning,
    Continuation,
    Generate,
    Generation,
    Said,
    check_turn_sampling,
    new_turn_id,
    session_closed,
    turn_prompt,
)
from trioserve.engine.sessions.turn_tree import SessionTurn, Turns
from trioserve.protocol.errors import InvalidRequest, RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, GenerationStream, PromptLike, completion_of
from trioserve.requests.request import Request
from trioserve.scheduler.prefix_pins import PrefixPins

SESSION_PRIORITY = 60
"""Priority of the pages of an open session, of 100. The usual one is 35."""
MAX_CAPACITY = 1 << 20
"""Most tokens that a session may hold."""
MAX_TURNS = 10_000


class SessionOwner(Protocol):
    """The collection that a session belongs to, as the session uses it."""

    generate: Generate
    end: Callable[[Request, RequestAborted], None]
    pins: PrefixPins

    def on_touched(self) -> None:
        """Follow a session's new deadline."""

    def on_closed(self, session: Session) -> None:
        """Forget ``session``, which is closed."""


@attrs.define(eq=False)
class Session:
    """One conversation, for as long as it is open: see :meth:`trioserve.Engine.open_session`."""

    id: str
    capacity: int
    """Tokens in its history past which no turn begins."""
    timeout: float
    """Seconds without a turn after which it is closed; infinity for never."""
    owner: str | None
    """The owner's name: a session is found only with it."""
    tenant: str
    """The name under which its share of all sessions counts; empty for none."""
    goes_on: bool
    """True if a turn that names no other one goes on from the last."""
    _name: str
    _sessions: SessionOwner = attrs.field(repr=False)
    _turns: Turns = attrs.field(init=False, factory=Turns, repr=False)
    _running: dict[str, tuple[Beginning, Callable[[], None]]] = attrs.field(
        init=False, factory=dict, repr=False
    )
    """Turns by their ids, each with what ends it if the session is closed."""
    is_closed: bool = attrs.field(init=False, default=False)
    deadline: float = attrs.field(init=False, default=math.inf)
    """Time at which it will be closed, in seconds on trio's clock."""

    @property
    def turns(self) -> list[str]:
        """The ids of the turns in its history, in the order in which they ended."""
        return [turn.id for turn in self._turns]

    @property
    def num_tokens(self) -> int:
        """Tokens that its history holds; what several turns go on from counts once."""
        return self._turns.num_tokens

    def tokens(self, turn: str | None = None) -> list[int]:
        """Return all tokens up to the end of a turn: the last one, if none is named.

        Raises:
            InvalidRequest: there is no such turn.
        """
        found = self._turns.last if turn is None else self._find(turn)
        return [] if found is None else found.tokens()

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        continuation: Continuation = AFTER_THE_LAST,
        request_id: str | None = None,
        **options: Any,
    ) -> Generation:
        """Generate a turn: ``async with session.generate(...) as stream``.

        All else is as in :meth:`trioserve.Engine.generate`.

        Args:
            prompt: the new part: text or token ids.
            params: sampling parameters; or give their fields as keyword arguments. There is one
                output.
            continuation: the point of the history to go on from (default: the last turn).
            request_id: the turn's id (default: a random one).

        Raises:
            InvalidRequest: the session is closed or full, there is no such turn, or an argument
                can't be served; ``param`` names it.
        """
        check_turn_sampling(params, options)
        id = request_id or new_turn_id()
        beginning = self.begin(id, continuation)
        generation = self._sessions.generate(
            turn_prompt(prompt, beginning.prefix),
            params,
            request_id=id,
            prefix_ids=beginning.prefix,
            **options,
        )
        return self._turn(beginning, generation)

    async def complete(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """Generate a turn as :meth:`generate`; return the whole output at once."""
        async with self.generate(prompt, params, **options) as stream:
            chunks = [chunk async for chunk in stream]
        return completion_of(stream, chunks)

    def close(self) -> None:
        """Forget everything, and end the turns that run. Never blocks; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        for _, end in self._running.values():
            end()
        self._forget(list(self._turns))
        self._sessions.on_closed(self)

    @contextlib.asynccontextmanager
    async def _turn(
        self, beginning: Beginning, generation: Generation
    ) -> AsyncIterator[GenerationStream]:
        stream: GenerationStream | None = None

        def end() -> None:
            if stream is not None:
                self._sessions.end(stream.request, session_closed())

        async def keep(output_ids: list[int]) -> None:
            assert stream is not None
            self.keep(beginning, Said.of(stream, len(beginning.prefix), output_ids))

        self.enter(beginning, end)
        try:
            async with generation as stream:
                if self.is_closed:
                    raise session_closed()
                stream.before_complete = keep
                yield stream
        finally:
            self.leave(beginning)

    # ---- a turn, wherever its request is made

    def begin(self, id: str, continuation: Continuation) -> Beginning:
        """Decide from which point the turn of that id goes on. It doesn't run yet.

        Raises:
            InvalidRequest: as :meth:`generate`.
        """
        self._check_open()
        self._check_id(id)
        if continuation.after is not None:
            parent: SessionTurn | None = self._find(continuation.after)
        elif continuation.anew or continuation.replace or not self.goes_on:
            parent = None
        else:
            parent = self._turns.last
        prefix: list[int] = []
        if parent is not None:
            prefix = parent.tokens()
            if continuation.drop_previous_output:
                prefix = prefix[: parent.cut + parent.num_prompt_tokens]
            if continuation.offset is not None:
                prefix = prefix[: continuation.offset]
        return Beginning(id, parent, prefix, continuation.replace)

    def enter(self, beginning: Beginning, end: Callable[[], None]) -> None:
        """Count the turn as running; ``end`` is called if the session is closed meanwhile.

        Raises:
            InvalidRequest: the session is closed or full by now, or another turn has that id.
        """
        self._check_open()
        self._check_id(beginning.id)
        self._running[beginning.id] = beginning, end
        self.deadline = math.inf

    def keep(self, beginning: Beginning, said: Said) -> None:
        """Add a turn to the history: it has ended as it should, and its reader gets the rest."""
        self.leave(beginning)
        if self.is_closed:
            return
        parent = beginning.parent
        if parent is not None and self._turns.get(parent.id) is not parent:
            return  # What it went on from was replaced meanwhile.
        if beginning.replace:
            others = list(self._turns) if parent is None else list(parent.children)
            self._forget(others)
        turn = SessionTurn(
            id=beginning.id,
            parent=parent,
            cut=len(beginning.prefix),
            own=said.own,
            num_prompt_tokens=said.num_prompt_tokens,
            salt=said.salt,
            adapter=said.adapter,
        )
        self._turns.add(turn)
        self._hold(turn)
        if parent is not None:
            self._hold(parent)

    def leave(self, beginning: Beginning) -> None:
        """Count the turn as running no more. Unless it was kept it leaves no trace. Idempotent."""
        running, _ = self._running.get(beginning.id, (None, None))
        if running is beginning:
            del self._running[beginning.id]
            self.touch()

    def _check_open(self) -> None:
        if self.is_closed:
            raise InvalidRequest("the session is closed", param="session", code="session_closed")
        if self._turns.num_tokens >= self.capacity or len(self._turns) >= MAX_TURNS:
            raise InvalidRequest(
                f"the session is full: its turns hold {self._turns.num_tokens} tokens, and its "
                f"capacity is {self.capacity}",
                param="session",
                code="session_full",
            )

    def _check_id(self, id: str) -> None:
        if id in self._turns or id in self._running:
            raise InvalidRequest(f"the session has a turn {id!r} already", param="request_id")

    def _find(self, id: str) -> SessionTurn:
        turn = self._turns.get(id)
        if turn is None:
            state = "has not ended yet" if id in self._running else "isn't in the session"
            raise InvalidRequest(f"the turn {id!r} {state}", param="after")
        return turn

    def _hold(self, turn: SessionTurn) -> None:
        """Pin a turn if it is an end of the history; otherwise a later turn's pin covers it."""
        name = self._hold_name(turn)
        if turn.is_covered:
            self._sessions.pins.unpin(name)
        else:
            self._sessions.pins.pin(
                name, turn.tokens(), SESSION_PRIORITY, salt=turn.salt, adapter=turn.adapter
            )

    def _forget(self, turns: list[SessionTurn]) -> None:
        for turn in self._turns.remove(turns):
            self._sessions.pins.unpin(self._hold_name(turn))

    def _hold_name(self, turn: SessionTurn) -> str:
        return f"{self._name}/{turn.id}"

    def hold_names(self) -> Iterator[str]:
        """Return the names of all pins that it may have."""
        return map(self._hold_name, self._turns)

    def touch(self) -> None:
        """Start the time without a turn again."""
        if not self._running and not self.is_closed:
            self.deadline = trio.current_time() + self.timeout
            self._sessions.on_touched()

    def check_integrity(self) -> None:
        """Assert the invariants of an open session."""
        assert not self.is_closed
        self._turns.check_integrity()
        assert not set(self._running) & set(self.turns), "a turn runs that has ended"
        assert (self.deadline == math.inf) >= bool(self._running)
