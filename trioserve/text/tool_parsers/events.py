"""The events of a tool parser: text, and calls of functions with their arguments."""

from __future__ import annotations

import attrs


@attrs.frozen
class TextPiece:
    """More of the answer's text."""

    text: str


@attrs.frozen
class ToolCallStart:
    """A call begins: the ``index``-th of the answer, from 0."""

    index: int
    id: str
    name: str


@attrs.frozen
class ArgumentsDelta:
    """More of a call's arguments: JSON as the model writes it, in any pieces."""

    index: int
    text: str


Event = TextPiece | ToolCallStart | ArgumentsDelta
