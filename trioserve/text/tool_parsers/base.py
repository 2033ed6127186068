"""What the parsers of all families have in common: pieces in, events out.

A parser is a state machine whose states are methods. A state takes the text and a position, does
what it can, and returns the position up to which the text is dealt with; where it stays the same
state at the same position it needs more text, and what is left is kept for the next piece. That is
never more than a part of a marker, so all work is linear in the text.

What turns out not to be a call is given back as text. A call that breaks inside its arguments has
been streamed by then: what follows, up to where the call would have ended, belongs to them too, so
that a client gets what the model wrote and sees for itself that it is no JSON.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from trioserve.text.tool_parsers.calls import CallScanner
from trioserve.text.tool_parsers.events import ArgumentsDelta, Event, TextPiece, ToolCallStart
from trioserve.text.tool_parsers.tools import Tool

State = Callable[[str, int], int]


class ToolParser(Protocol):
    """Turns the text of one answer into events. Pure: no I/O, and no exception for any text."""

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        ...

    def finish(self) -> list[Event]:
        """The events of what was still held back when the answer ended."""
        ...


def new_call_id() -> str:
    """An id for a call that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def find_marker(text: str, start: int, markers: Collection[str]) -> tuple[int, str | None]:
    """Where the first of ``markers`` begins, and which it is.

    Without one, where the longest part of one begins that the text ends with (else its end), and
    None.
    """
    if not any(marker[0] in text for marker in markers):
        return len(text), None  # As it is for most pieces of most answers.
    found = [(at, marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if found:
        return min(found)
    longest = max(map(len, markers))
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at, None
    return len(text), None


class MarkedParser(abc.ABC):
    """The machinery; a family adds the states in which its markers are looked for.

    Args:
        names: the functions that may be called; a call of another one is text.
        new_id: gives the id of each call.
        free: whether no grammar held the answer. Then calls are also found where, and as, no
            grammar lets them stand.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """What the family writes around its calls; special tokens in some models."""

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str] = new_call_id,
        *,
        free: bool = True,
    ) -> None:
        self._names = frozenset(names)
        self._new_id = new_id
        self._free = free
        self._state: State = self._start
        self._rest = ""
        self._lead = ""
        """Text before the current call that is given back with it if it is none."""
        self._scanner = CallScanner(self._names)
        self._num_calls = 0
        self._space: list[str] = []
        """White space that becomes text only if text follows, or if there is no call at all."""
        self._has_text = False
        self._events: list[Event] = []

    @classmethod
    def of(cls, tools: Collection[Tool], *, free: bool = True) -> MarkedParser:
        """Return a parser of calls of ``tools``."""
        return cls([tool.name for tool in tools], free=free)

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        text, position = self._rest + text, 0
        while position < len(text):
            before = position, self._state
            position = self._state(text, position)
            if (position, self._state) == before:
                break
        self._rest = text[position:]
        return self._taken()

    def finish(self) -> list[Event]:
        """The events of what was still held back when the answer ended."""
        rest, self._rest = self._rest, ""
        if self._state == self._broken_arguments:
            self._add_arguments(rest)
        elif self._state == self._call and self._scanner.started:
            assert not rest
            self._add_arguments(self._scanner.unread)
        else:
            raw = self._scanner.raw if self._state == self._call else ""
            self._add_text(self._lead + raw + rest)
        if not self._num_calls and self._space:
            self._events.append(TextPiece("".join(self._space)))
        self._space.clear()
        self._lead = ""
        self._state = self._text
        return self._taken()

    # -- states ------------------------------------------------------------------------------

    @abc.abstractmethod
    def _start(self, text: str, position: int) -> int:
        """At the beginning of the answer."""

    @abc.abstractmethod
    def _text(self, text: str, position: int) -> int:
        """In text that is no call."""

    @abc.abstractmethod
    def _after_call(self, text: str, position: int) -> int:
        """Behind the object that was a call."""

    def _call(self, text: str, position: int) -> int:
        """In an object that may be a call."""
        scanner, arguments = self._scanner, list[str]()
        had_started = scanner.started
        end = scanner.scan(text, position, arguments)
        if scanner.started and not had_started:
            assert scanner.name is not None
            self._add_call(scanner.name)
        for piece in arguments:
            self._add_arguments(piece)
        if scanner.broken and not scanner.started:
            self._add_text(self._lead + scanner.raw)
            self._become(self._text)
        elif scanner.broken and scanner.in_arguments:
            self._become(self._broken_arguments)
        elif scanner.broken or scanner.done:
            self._become(self._after_call)
        return end

    def _broken_arguments(self, text: str, position: int) -> int:
        """Behind the point at which the arguments ceased to be JSON."""
        self._add_arguments(text[position:])
        return len(text)

    # -- what states do ----------------------------------------------------------------------

    def _become(self, state: State, lead: str = "") -> None:
        self._state = state
        self._lead = lead

    def _expect_call(self, lead: str, *, needs_arguments: bool = False) -> None:
        """Expect an object, which may be a call; ``lead`` came before it."""
        self._scanner = CallScanner(self._names, needs_arguments)
        self._become(self._call, lead)

    def _add_call(self, name: str, id: str | None = None) -> None:
        if not self._has_text:
            self._space.clear()
        self._events.append(ToolCallStart(self._num_calls, id or self._new_id(), name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        index = self._num_calls - 1
        last = self._events[-1] if self._events else None
        if isinstance(last, ArgumentsDelta) and last.index == index:
            self._events[-1] = ArgumentsDelta(index, last.text + text)
        else:
            self._events.append(ArgumentsDelta(index, text))

    def _add_text(self, text: str) -> None:
        visible = text.rstrip()
        space = text[len(visible) :]
        if visible:
            self._events.append(TextPiece("".join(self._space) + visible))
            self._space.clear()
            self._has_text = True
        if space:
            self._space.append(space)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
