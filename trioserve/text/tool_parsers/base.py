"""The base of all tool parsers, which turn pieces of text into events.

A parser is a state machine whose states are methods. A state takes the text and a position, and
returns the position up to which it has processed the text. If neither state nor position changes,
it needs more text, and the rest is kept for the next piece. The rest is at most a part of a marker,
so all work is linear in the text.

Text that isn't a call after all is returned as text. If a call's arguments become invalid, their
beginning has already been streamed. So the rest up to the call's end is also returned as arguments:
the client gets the model's text and sees that it isn't valid JSON.
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
    """Parser of one answer's text into events. It does no I/O, and no text makes it raise."""

    def feed(self, text: str) -> list[Event]:
        """Return the events of the next piece of the answer."""
        ...

    def finish(self) -> list[Event]:
        """Return the events of the text held back until the end of the answer."""
        ...


def new_call_id() -> str:
    """Return a new call id."""
    return f"call_{secrets.token_hex(12)}"


def find_marker(text: str, start: int, markers: Collection[str]) -> tuple[int, str | None]:
    """Return the start of the first of ``markers``, and the marker.

    If there is none, return the start of the longest part of a marker at the text's end (or the
    text's length), and None.
    """
    if not any(marker[0] in text for marker in markers):
        return len(text), None  # The usual case.
    found = [(at, marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if found:
        return min(found)
    longest = max(map(len, markers))
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at, None
    return len(text), None


class MarkedParser(abc.ABC):
    """Base of the parsers; a family adds the states that look for its markers.

    Args:
        names: Functions that may be called; a call of another one is text.
        new_id: Returns the id of each call.
        free: True if the answer was written without a grammar. Then calls are also found in places
            and forms that a grammar would exclude.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Markers around the family's calls; special tokens in some models."""

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
        """Text before the current call, returned with it if it isn't a call."""
        self._scanner = CallScanner(self._names)
        self._num_calls = 0
        self._space: list[str] = []
        """White space that is returned only if text follows, or if there is no call."""
        self._has_text = False
        self._events: list[Event] = []

    @classmethod
    def of(cls, tools: Collection[Tool], *, free: bool = True) -> MarkedParser:
        """Return a parser for calls of ``tools``."""
        return cls([tool.name for tool in tools], free=free)

    def feed(self, text: str) -> list[Event]:
        """Return the events of the next piece of the answer."""
        text, position = self._rest + text, 0
        while position < len(text):
            before = position, self._state
            position = self._state(text, position)
            if (position, self._state) == before:
                break
        self._rest = text[position:]
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the events of the text held back until the end of the answer."""
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
        """Handle the beginning of the answer."""

    @abc.abstractmethod
    def _text(self, text: str, position: int) -> int:
        """Handle text outside of calls."""

    @abc.abstractmethod
    def _after_call(self, text: str, position: int) -> int:
        """Handle the text after a call's object."""

    def _call(self, text: str, position: int) -> int:
        """Handle an object that may be a call."""
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
        """Handle the text after arguments that became invalid JSON."""
        self._add_arguments(text[position:])
        return len(text)

    # -- actions of states ---------------------------------------------------------------------

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
