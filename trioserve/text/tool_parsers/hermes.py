"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM3.

Models also write several calls in one pair of tags, as an array or with commas between them.
"""

from __future__ import annotations

from trioserve.text.tool_parsers.base import MarkedParser, find_marker
from trioserve.text.tool_parsers.values import skip_space

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser(MarkedParser):
    """Calls between tags, anywhere in the answer."""

    markers = (_OPEN, _CLOSE)
    _in_array = False

    def _start(self, text: str, position: int) -> int:
        self._become(self._text)
        return position

    def _text(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, [_OPEN])
        self._add_text(text[position:at])
        if marker is None:
            return at
        self._become(self._after_open, _OPEN)
        return at + len(marker)

    def _after_open(self, text: str, position: int) -> int:
        first = skip_space(text, position)
        self._lead += text[position:first]
        if first == len(text):
            return first
        self._in_array = self._free and text[first] == "["
        self._expect_call(self._lead + "[" if self._in_array else self._lead)
        return first + self._in_array

    def _after_call(self, text: str, position: int) -> int:
        first = skip_space(text, position)
        self._add_text(text[position:first])
        if first == len(text):
            return first
        if self._free and text[first] == ",":
            self._become(self._after_comma, ",")
            return first + 1
        if self._in_array and text[first] == "]":
            self._in_array = False
            return first + 1
        self._become(self._up_to_close)
        return first

    def _after_comma(self, text: str, position: int) -> int:
        """Expect another call; otherwise the comma is text."""
        first = skip_space(text, position)
        self._lead += text[position:first]
        if first == len(text):
            return first
        if text[first] == "{":
            self._expect_call(self._lead)
            return first
        self._add_text(self._lead)
        self._become(self._up_to_close)
        return first

    def _up_to_close(self, text: str, position: int) -> int:
        """Find the closing tag. Models omit it, or close one brace too many."""
        at, marker = find_marker(text, position, [_CLOSE, _OPEN])
        self._add_text(text[position:at])
        if marker is None:
            return at
        if marker == _OPEN:
            self._become(self._after_open, _OPEN)
        else:
            self._become(self._text)
        return at + len(marker)

    def _broken_arguments(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, [_CLOSE])
        self._add_arguments(text[position:at])
        if marker is None:
            return at
        self._become(self._text)
        return at + len(marker)
