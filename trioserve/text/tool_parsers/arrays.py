"""Calls as JSON objects, in a row or in an array."""

from __future__ import annotations

from trioserve.text.tool_parsers.base import MarkedParser
from trioserve.text.tool_parsers.values import skip_space


class ArrayParser(MarkedParser):
    """States for ``{…}`` and ``[{…}, {…}]``."""

    _in_array = False

    def _objects(self, first: str, lead: str) -> bool:
        """Expect an array of calls if ``first`` is a bracket, else an object.

        Returns:
            True if ``first`` was taken.
        """
        self._in_array = first == "["
        self._expect_call(lead + "[" if self._in_array else lead)
        return self._in_array

    def _after_call(self, text: str, position: int) -> int:
        if not self._in_array:
            self._become(self._text)
            return position
        first = skip_space(text, position)
        self._add_text(text[position:first])
        if first == len(text):
            return first
        if text[first] == ",":
            self._expect_call(",")
            return first + 1
        self._become(self._text)
        return first + (text[first] == "]")
