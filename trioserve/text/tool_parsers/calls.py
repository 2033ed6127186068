"""A scanner of one call as a JSON object, ``{"name": …, "arguments": {…}}``, in pieces of text."""

from __future__ import annotations

import json
from collections.abc import Collection

import attrs

from trioserve.text.tool_parsers.values import ValueScanner, skip_space

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
"""Keys of a call's object; any other key shows that it isn't a call."""


@attrs.define(eq=False)
class CallScanner:
    """Scanner of one object that may be a call. It returns the arguments as they come.

    Arguments are returned when the name is one of ``names`` and the arguments have begun. Until
    then ``raw`` has all text read so far, in case it isn't a call. Arguments before the name are
    held back until the name comes. Without arguments it is a call with ``{}``, unless
    ``needs_arguments``. Arguments in a string are held back until its end; if the string contains a
    JSON object, as Granite 4 writes it, the object is returned.
    """

    names: Collection[str]
    needs_arguments: bool = False
    name: str | None = None
    started: bool = False
    """True if it is certainly a call; then ``scan`` returns its arguments."""
    done: bool = False
    broken: bool = False
    _expected: str = "object"
    _key: str = ""
    _value: ValueScanner = attrs.field(factory=ValueScanner)
    _string: list[str] = attrs.field(factory=list)
    """Pieces of the key or name that is being read."""
    _has_arguments: bool = False
    _in_string: bool = False
    """True if the arguments are in a string."""
    _held: list[str] = attrs.field(factory=list)
    """Arguments that came before the name."""
    _raw: list[str] = attrs.field(factory=list)

    @property
    def raw(self) -> str:
        """All text read so far, while it hasn't ``started``."""
        return "".join(self._raw)

    @property
    def unread(self) -> str:
        """Part of a string of arguments read so far, while the string hasn't ended."""
        return "".join(self._string) if self.in_arguments and self._in_string else ""

    @property
    def in_arguments(self) -> bool:
        """True if the arguments have begun and not ended."""
        return self._expected == "arguments"

    def scan(self, text: str, start: int, arguments: list[str]) -> int:
        """Continue at ``start`` until the object is ``done`` or ``broken``; return the end.

        Pieces of the arguments are appended to ``arguments``.
        """
        position = start
        while position < len(text) and not (self.done or self.broken):
            if self._expected in ("key_string", "name", "arguments", "other"):
                position = self._go_on_with_value(text, position, arguments)
            else:
                position = self._between_values(text, position, arguments)
        if not self.started:
            self._raw.append(text[start:position])
        return position

    def _between_values(self, text: str, position: int, arguments: list[str]) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        character = text[position]
        if self._expected == "value":
            self._begin_value(character)
            return position
        if character == '"' and self._expected in ("key", "key_or_end"):
            self._value, self._string = ValueScanner(), []
            self._expected = "key_string"
            return position
        if character == "}" and self._expected in ("key_or_end", "comma_or_end"):
            self._end(arguments)
            return position + (not self.broken)
        follows = {("object", "{"): "key_or_end", ("colon", ":"): "value"}
        follows["comma_or_end", ","] = "key"
        expected = follows.get((self._expected, character))
        if expected is None:
            self.broken = True
            return position
        self._expected = expected
        return position + 1

    def _begin_value(self, first: str) -> None:
        self._value, self._string = ValueScanner(), []
        if self._key == "name" and self.name is None:
            self._expected = "name"
            self.broken = first != '"'
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._expected = "arguments"
            self._has_arguments = True
            self._in_string = first == '"'
        else:
            self._expected = "other"

    def _go_on_with_value(self, text: str, position: int, arguments: list[str]) -> int:
        end = self._value.scan(text, position)
        if self._expected == "arguments" and end > position:
            piece = text[position:end]
            if self._in_string:
                self._string.append(piece)
                piece = _serialized(self._string) if self._value.done else ""
            self._give_arguments(piece, arguments)
        elif self._expected in ("key_string", "name"):
            self._string.append(text[position:end])
        self.broken = self._value.broken
        if self._value.done:
            self._end_value(arguments)
        return end

    def _give_arguments(self, piece: str, arguments: list[str]) -> None:
        if self.name is None:
            self._held.append(piece)
        else:
            self.started = True
            if piece:
                arguments.append(piece)

    def _end_value(self, arguments: list[str]) -> None:
        if self._expected == "key_string":
            self._key = _decoded(self._string) or ""
            self.broken = self._key not in _KEYS
            self._expected = "colon"
            return
        if self._expected == "name":
            self.name = _decoded(self._string)
            self.broken = self.name not in self.names
            if self._held and not self.broken:
                self.started = True
                arguments.extend(self._held)
        self._expected = "comma_or_end"

    def _end(self, arguments: list[str]) -> None:
        if self.name is None or (self.needs_arguments and not self._has_arguments):
            self.broken = True
            return
        self.done = True
        if not self.started:
            self.started = True
            arguments.append("{}")


def _serialized(pieces: list[str]) -> str:
    """Return the JSON object inside a JSON string; the string itself without one."""
    text = _decoded(pieces)
    if text is not None and text.lstrip().startswith("{"):
        try:
            json.loads(text)
            text.encode()  # An escape may be half of a character, which can't be sent.
        except (ValueError, RecursionError):
            pass
        else:
            return text
    return "".join(pieces)


def _decoded(pieces: list[str]) -> str | None:
    """Return the value of a JSON string; None if it is invalid."""
    try:
        value = json.loads("".join(pieces), strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
