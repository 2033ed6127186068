"""Calls as tags around each argument: Qwen3-Coder's and GLM-4.5's.

.. code-block:: text

    <tool_call>                       <tool_call>weather
    <function=weather>                <arg_key>city</arg_key>
    <parameter=city>                  <arg_value>Köln</arg_value>
    Köln                              <arg_key>days</arg_key>
    </parameter>                      <arg_value>3</arg_value>
    </function>                       </tool_call>
    </tool_call>

Strings are unquoted, other values are JSON. The arguments are returned as a JSON object: a string
as it comes, another value when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import attrs

from trioserve.text.tool_parsers.base import MarkedParser, find_marker, new_call_id
from trioserve.text.tool_parsers.events import Event
from trioserve.text.tool_parsers.tools import Tool
from trioserve.text.tool_parsers.xml_values import as_json, escaped, is_text, property_schema

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_MAX_NAME_CHARACTERS = 256


@attrs.frozen(kw_only=True)
class TagStyle:
    """The text between the parts of a call, exactly as chat templates print it.

    A parser ignores white space at the ends of most of these texts.
    """

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    after_values: str


QWEN3_CODER = TagStyle(
    before_name=f"{_OPEN}\n<function=",
    after_name=">\n",
    before_key="<parameter=",
    after_key=">",
    before_value="\n",
    after_value="\n</parameter>\n",
    after_values=f"</function>\n{_CLOSE}",
)
GLM = TagStyle(
    before_name=_OPEN,
    after_name="\n",
    before_key="<arg_key>",
    after_key="</arg_key>",
    before_value="\n<arg_value>",
    after_value="</arg_value>\n",
    after_values=_CLOSE,
)


class TaggedParser(MarkedParser):
    """States common to both forms.

    Args:
        schemas: Schemas of the arguments, by function name.
    """

    style: ClassVar[TagStyle]
    opens: ClassVar[tuple[str, ...]] = (_OPEN,)
    """Text that a call begins with."""
    name_ends: ClassVar[tuple[str, ...]]
    """Texts that end a function's name. Only the last one is skipped."""

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str] = new_call_id,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        free: bool = True,
    ) -> None:
        super().__init__(names, new_id, free=free)
        self._schemas = schemas or {}
        self._called = ""
        self._key: list[str] = []
        self._num_values = 0
        self._schema: Mapping[str, Any] = {}
        self._value: list[str] = []
        """Value that is held back until it is complete."""
        self._space_at_end = ""
        """Text that may be the white space before a string's closing tag."""
        self._value_begun = False
        self._key_mark = self.style.before_key.strip()
        self._value_mark = self.style.before_value.strip()
        self._value_end = self.style.after_value.strip()
        self._end_mark = self.style.after_values.split("\n")[0]
        self._value_ends: tuple[str, ...] = (self._value_end,)
        if free:
            # Models omit closing tags. A string may contain any of these, but rarely at the
            # beginning of a line.
            others = (self._key_mark, self._end_mark, _CLOSE)
            self._value_ends += tuple(f"\n{mark}" for mark in others)

    def finish(self) -> list[Event]:
        """Return the events of the text held back at the end of the answer."""
        if self._state in (self._between, self._in_key, self._before_value, self._in_value):
            if self._state == self._in_value:
                self._add_arguments("".join(self._value).strip())
            self._rest = ""  # At most a part of a tag.
            self._become(self._text)
        return super().finish()

    @classmethod
    def of(cls, tools: Collection[Tool], *, free: bool = True) -> TaggedParser:
        """Return a parser for calls of ``tools``."""
        schemas = {tool.name: tool.parameters for tool in tools}
        return cls([tool.name for tool in tools], schemas=schemas, free=free)

    # -- states ------------------------------------------------------------------------------

    def _start(self, text: str, position: int) -> int:
        self._become(self._text)
        return position

    def _in_name(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, self.name_ends)
        self._lead += text[position:at]
        name = self._lead[self._name_start :].strip()
        is_too_long = len(self._lead) > self._name_start + _MAX_NAME_CHARACTERS
        if marker is not None and name in self._names:
            self._begin_call(name)
            return at + len(marker) if marker == self.name_ends[-1] else at
        if marker is not None or is_too_long:
            self._add_text(self._lead)
            self._become(self._text)
        return at

    def _between(self, text: str, position: int) -> int:
        """Expect a key or the end; skip other text."""
        at, marker = find_marker(text, position, (self._key_mark, self._end_mark, _CLOSE))
        if marker is None:
            return at
        if marker == self._key_mark:
            self._key = []
            self._become(self._in_key)
            return at + len(marker)
        self._add_arguments("}" if self._num_values else "{}")
        self._become(self._text if marker == _CLOSE else self._after_call)
        return at + len(marker)

    def _in_key(self, text: str, position: int) -> int:
        ends = [self.style.after_key]
        if self._value_mark:
            ends.append(self._value_mark)
        at, marker = find_marker(text, position, ends)
        self._key.append(text[position:at])
        if marker is None:
            return at
        key = "".join(self._key).strip()
        self._schema = property_schema(self._schemas.get(self._called, {}), key)
        self._add_arguments(f"{', ' if self._num_values else '{'}{escaped(key, quote=True)}: ")
        self._num_values += 1
        self._become(self._before_value)
        return at + len(marker) if marker == self.style.after_key else at

    def _before_value(self, text: str, position: int) -> int:
        if self._value_mark:
            at, marker = find_marker(text, position, (self._value_mark,))
            if marker is None:
                return at
            position = at + len(marker)
        self._value, self._space_at_end, self._value_begun = [], "", False
        if is_text(self._schema):
            self._add_arguments('"')
        self._become(self._in_value)
        return position

    def _in_value(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, self._value_ends)
        self._give_value(text[position:at])
        if marker is None:
            return at
        if is_text(self._schema):
            self._add_arguments('"')
        else:
            self._add_arguments(as_json("".join(self._value), self._schema))
        self._become(self._between)
        return at + len(marker) if marker == self._value_end else at

    def _after_call(self, text: str, position: int) -> int:
        """Expect the closing tag, which models sometimes omit."""
        at, marker = find_marker(text, position, (_CLOSE, *self.opens))
        piece = text[position:at]
        visible = piece.rstrip()
        if visible:
            self._add_text(self._lead + visible)
            self._lead = ""
        self._lead += piece[len(visible) :]
        if marker is None:
            return at
        self._become(self._text)
        return at + len(marker) if marker == _CLOSE else at

    # -- actions of states ---------------------------------------------------------------------

    def _begin_call(self, name: str) -> None:
        self._add_call(name)
        self._called, self._num_values = name, 0
        self._become(self._between)

    def _give_value(self, piece: str) -> None:
        """Return a piece of a string without line breaks at its ends; hold back other values."""
        if not is_text(self._schema):
            self._value.append(piece)
            return
        break_ = self.style.after_value.partition("<")[0]
        begun, self._value_begun = self._value_begun, self._value_begun or bool(piece)
        if not begun:
            piece = piece.removeprefix(break_) if break_ else piece
        piece = self._space_at_end + piece
        self._space_at_end = break_ if break_ and piece.endswith(break_) else ""
        self._add_arguments(escaped(piece.removesuffix(self._space_at_end)))

    @property
    def _name_start(self) -> int:
        """The start of the name in the text before the call is certain."""
        return len(_OPEN)


class Qwen3CoderParser(TaggedParser):
    """Parser of ``<function=…>`` in tags, anywhere in the answer; the outer tag may be missing."""

    style = QWEN3_CODER
    markers = (_OPEN, _CLOSE, "<function=", "</function>", "<parameter=", "</parameter>")
    opens = (_OPEN, "<function=")
    name_ends = (">",)

    def _text(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, self.opens)
        self._add_text(text[position:at])
        if marker is None:
            return at
        if marker == _OPEN:
            self._become(self._after_open, _OPEN)
        else:
            self._become(self._in_name, marker)
        return at + len(marker)

    def _after_open(self, text: str, position: int) -> int:
        rest = text[position:]
        stripped = rest.lstrip()
        if stripped.startswith("<function="):
            end = position + len(rest) - len(stripped) + len("<function=")
            self._become(self._in_name, self._lead + text[position:end])
            return end
        if "<function=".startswith(stripped) and len(self._lead) < _MAX_NAME_CHARACTERS:
            space = len(rest) - len(stripped)
            self._lead += rest[:space]
            return position + space
        self._add_text(self._lead)
        self._become(self._text)
        return position

    @property
    def _name_start(self) -> int:
        return self._lead.index("=") + 1


class GlmParser(TaggedParser):
    """Parser of ``<arg_key>`` and ``<arg_value>`` in a tag, anywhere in the answer."""

    style = GLM
    markers = (_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    name_ends = ("<arg_key>", _CLOSE, "\n")

    def _text(self, text: str, position: int) -> int:
        at, marker = find_marker(text, position, (_OPEN,))
        self._add_text(text[position:at])
        if marker is None:
            return at
        self._become(self._in_name, _OPEN)
        return at + len(marker)
