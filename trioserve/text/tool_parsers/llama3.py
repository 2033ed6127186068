"""``{"name": …, "parameters": {…}}`` as the whole answer: Llama 3.1, 3.2 and 3.3.

Several calls are separated by ``;``, and ``<|python_tag|>`` may precede them. Small models also
write calls on separate lines, and between texts.
"""

from __future__ import annotations

from trioserve.text.tool_parsers.base import MarkedParser, find_marker
from trioserve.text.tool_parsers.values import skip_space

_TAG = "<|python_tag|>"


class Llama3Parser(MarkedParser):
    """Parser of calls at the beginning or after the tag; in a free answer, anywhere."""

    markers = (_TAG,)
    _separator = 0
    """Index of the last separator in the white space that is held back."""

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
        at, marker = find_marker(text, position, [_TAG, "{"] if self._free else [_TAG])
        self._add_text(text[position:at])
        if marker is None:
            return at
        if marker == "{":
            # An object with only a name, shown in text, isn't a call.
            self._expect_call("", needs_arguments=True)
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
        self._separator = len(self._space)
        self._space.append(";")
        self._become(self._after_separator)
        return first + 1

    def _after_separator(self, text: str, position: int) -> int:
        """Expect another call, which may have its own tag; otherwise the separator is text."""
        first = skip_space(text, position)
        self._add_text(text[position:first])
        if first == len(text):
            return first
        tag = _TAG if text.startswith(_TAG, first) else ""
        if tag or text[first] == "{":
            lead = "".join(self._space[self._separator :])
            del self._space[self._separator :]
            self._expect_call(lead + tag)
        elif not _TAG.startswith(text[first:]):
            self._become(self._text)
        return first + len(tag)
