"""``{"name": …, "parameters": {…}}`` as the whole answer: Llama 3.1, 3.2 and 3.3.

Several calls are separated by ``;``, and ``<|python_tag|>`` may come before them.
"""

from __future__ import annotations

from trioserve.tool_parsers.base import MarkedParser, find_marker
from trioserve.tool_parsers.values import skip_space

__all__ = ["Llama3Parser"]

_TAG = "<|python_tag|>"


class Llama3Parser(MarkedParser):
    """Calls at the beginning of the answer, or behind the tag."""

    markers = (_TAG,)

    def _start(self, text: str, position: int) -> int:
        first = skip_space(text, position)
        self._add_text(text[position:first])
        if first < len(text):
            if text[first] == "{":
                self._expect_call("")
            elif not _TAG.startswith(text[first:]) or text.startswith(_TAG, first):
                self._become(self._text)
        return first

    def _text(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, [_TAG])
        self._add_text(text[position:at])
        if marker is None:
            return at
        self._expect_call(_TAG)
        return at + len(marker)

    def _after_call(self, text: str, position: int) -> int:
        first = skip_space(text, position)
        self._add_text(text[position:first])
        if first == len(text):
            return first
        if text[first] != ";":
            self._become(self._text)
            return first
        self._space.append(";")
        self._become(self._after_separator)
        return first + 1

    def _after_separator(self, text: str, position: int) -> int:
        """Another call, perhaps with a tag of its own; or else the separator was text."""
        return self._start(text, position)
