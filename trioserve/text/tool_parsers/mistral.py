"""``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, and the newer ``[TOOL_CALLS]name[ARGS]{…}``.

The newer form may omit ``[ARGS]``, or have ``[CALL_ID]`` and the call's id before it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection

from trioserve.text.tool_parsers.arrays import ArrayParser
from trioserve.text.tool_parsers.base import find_marker
from trioserve.text.tool_parsers.values import ValueScanner, skip_space

_MARKER = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
_HEAD_CHARACTERS = re.compile(r"[\w.\-\[\] ]*")
_HEAD = re.compile(r"\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*")
_MAX_HEAD_CHARACTERS = 256


def mistral_call_id() -> str:
    """Return an id in the form that Mistral's templates require: nine letters and digits."""
    return secrets.token_hex(5)[:9]


class MistralParser(ArrayParser):
    """Parser of calls after the marker, which is a special token."""

    markers = (_MARKER, _ARGS, _CALL_ID)

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str] = mistral_call_id,
        *,
        free: bool = True,
    ) -> None:
        super().__init__(names, new_id, free=free)
        self._arguments = ValueScanner()

    def _start(self, text: str, position: int) -> int:
        self._become(self._text)
        return position

    def _text(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, [_MARKER])
        self._add_text(text[position:at])
        if marker is None:
            return at
        self._become(self._after_marker, _MARKER)
        return at + len(marker)

    def _after_marker(self, text: str, position: int) -> int:
        first = skip_space(text, position)
        self._lead += text[position:first]
        if first < len(text) and text[first] in "[{":
            return first + self._objects(text[first], self._lead)
        if first < len(text) or self._is_too_long():
            self._become(self._head, self._lead)
        return first

    def _head(self, text: str, position: int) -> int:
        """Handle the name, and the text between it and the arguments."""
        match = _HEAD_CHARACTERS.match(text, position)
        assert match is not None
        self._lead += match[0]
        end = match.end()
        if end == len(text) and not self._is_too_long():
            return end
        head = _HEAD.fullmatch(self._lead.removeprefix(_MARKER))
        if end == len(text) or text[end] != "{" or not head or head["name"] not in self._names:
            self._add_text(self._lead)
            self._become(self._text)
            return end
        self._add_call(head["name"], head["id"])
        self._arguments = ValueScanner()
        self._become(self._bare_arguments)
        return end

    def _is_too_long(self) -> bool:
        return len(self._lead) > len(_MARKER) + _MAX_HEAD_CHARACTERS

    def _bare_arguments(self, text: str, position: int) -> int:
        """Handle the arguments of the newer form, which come after the name."""
        end = self._arguments.scan(text, position)
        self._add_arguments(text[position:end])
        if self._arguments.broken:
            self._become(self._broken_arguments)
        elif self._arguments.done:
            self._become(self._text)
        return end

    def _broken_arguments(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, [_MARKER])
        self._add_arguments(text[position:at])
        if marker is None:
            return at
        self._become(self._after_marker, _MARKER)
        return at + len(marker)
