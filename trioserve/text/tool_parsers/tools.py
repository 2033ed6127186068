"""What a model may call, and how its answer is to use that."""

from __future__ import annotations

from typing import Any

import attrs

NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""The schema of a function that says nothing of its arguments."""


@attrs.frozen
class Tool:
    """A function by its name. ``strict``: its arguments have to follow ``parameters``, a schema."""

    name: str
    parameters: dict[str, Any] = attrs.field(factory=lambda: dict(NO_PARAMETERS))
    strict: bool = False


@attrs.frozen(kw_only=True)
class ToolUse:
    """Which functions an answer may call, and whether it has to.

    ``parallel``: several calls in one answer are fine. ``answer`` is the Lark grammar of an answer
    without calls, where that isn't free either.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True
    answer: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of the functions."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def is_free(self) -> bool:
        """Whether the model may answer whatever it wants to."""
        return not (self.required or self.answer or self.is_strict) and self.parallel

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of some function have to follow their schema."""
        return any(tool.strict for tool in self.tools)
