"""A JSON object with name and arguments, or a list of them, as the whole answer.

This is for models whose template doesn't print tools. A system message describes the tools and this
form of a call.
"""

from __future__ import annotations

from trioserve.text.tool_parsers.arrays import ArrayParser
from trioserve.text.tool_parsers.values import skip_space


class JsonParser(ArrayParser):
    """Calls at the beginning of the answer and nowhere else."""

    def _start(self, text: str, position: int) -> int:
        first = skip_space(text, position)
        self._add_text(text[position:first])
        if first == len(text):
            return first
        if text[first] not in "[{":
            self._become(self._text)
            return first
        return first + self._objects(text[first], "")

    def _text(self, text: str, position: int) -> int:
        self._add_text(text[position:])
        return len(text)
