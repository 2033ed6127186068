"""A scanner for the end of a JSON value in pieces of text. It reads each character once."""

from __future__ import annotations

import re

import attrs

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[\s\w+\-.,:]*")
"""Characters between the strings and brackets of an array or an object."""
_SCALAR = re.compile(r"[\w+\-.]*")
_CLOSING = {"{": "}", "[": "]"}


def skip_space(text: str, start: int) -> int:
    """Return the position of the first character from ``start`` on that isn't JSON white space."""
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


@attrs.define(eq=False)
class ValueScanner:
    """Scanner of one JSON value, by its brackets and strings.

    It finds the value's end and doesn't check literals. ``broken`` is set at a bracket that doesn't
    match, or at a character that JSON allows only inside strings. A number or literal ends with the
    next character, so at the end of the text it isn't ``done``.
    """

    done: bool = False
    broken: bool = False
    _kind: str = ""
    """First character of a string or container; ``0`` for numbers and literals."""
    _closing: list[str] = attrs.field(factory=list)
    _in_string: bool = False
    _escaped: bool = False

    def scan(self, text: str, start: int) -> int:
        """Continue at ``start``; return the end of the value's part of ``text``."""
        position = start
        while position < len(text) and not (self.done or self.broken):
            position = self._step(text, position)
        return position

    def _step(self, text: str, position: int) -> int:
        if not self._kind:
            return self._first(text, position)
        if self._in_string:
            return self._string(text, position)
        if self._kind == "0":
            end = _end(_SCALAR, text, position)
            self.done = end < len(text)
            return end
        return self._container(text, position)

    def _first(self, text: str, position: int) -> int:
        character = text[position]
        if character in _CLOSING:
            self._kind = character
            self._closing.append(_CLOSING[character])
        elif character == '"':
            self._kind = character
            self._in_string = True
        elif _end(_SCALAR, text, position) > position:
            self._kind = "0"
            return position
        else:
            self.broken = True
            return position
        return position + 1

    def _string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        position = _end(_IN_STRING, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closing
        return position + 1

    def _container(self, text: str, position: int) -> int:
        position = _end(_BETWEEN, text, position)
        if position == len(text):
            return position
        character = text[position]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif character == self._closing[-1]:
            self._closing.pop()
            self.done = not self._closing
        else:
            self.broken = True
            return position
        return position + 1


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match is not None
    return match.end()
