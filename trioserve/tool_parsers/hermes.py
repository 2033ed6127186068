"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM3."""

from __future__ import annotations

from trioserve.tool_parsers.base import MarkedParser, find_marker

__all__ = ["HermesParser"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser(MarkedParser):
    """Calls between tags, anywhere in the answer."""

    markers = (_OPEN, _CLOSE)

    def _start(self, text: str, position: int) -> int:
        self._become(self._text)
        return position

    def _text(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, [_OPEN])
        self._add_text(text[position:at])
        if marker is None:
            return at
        self._expect_call(_OPEN)
        return at + len(marker)

    def _after_call(self, text: str, position: int) -> int:
        """Up to the closing tag; models forget it, or close one brace too many."""
        at, marker = find_marker(text, position, [_CLOSE, _OPEN])
        self._add_text(text[position:at])
        if marker is None:
            return at
        if marker == _OPEN:
            self._expect_call(_OPEN)
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
