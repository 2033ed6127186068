"""The events of a tool parser: text, and calls with their arguments."""

from __future__ import annotations

import attrs


@attrs.frozen
class TextPiece:
    """A piece of the answer's text."""

    text: str


@attrs.frozen
class ToolCallStart:
    """The beginning of a call; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@attrs.frozen
class ArgumentsDelta:
    """A piece of a call's arguments: the model's JSON, cut anywhere."""

    index: int
    text: str


Event = TextPiece | ToolCallStart | ArgumentsDelta
