"""The tools that a model may call, and constraints of its answer."""

from __future__ import annotations

from typing import Any

import attrs

NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""Schema of a function whose arguments aren't described."""


@attrs.frozen
class Tool:
    """A function. If ``strict``, its arguments have to follow ``parameters``, a JSON schema."""

    name: str
    parameters: dict[str, Any] = attrs.field(factory=lambda: dict(NO_PARAMETERS))
    strict: bool = False


@attrs.frozen(kw_only=True)
class ToolUse:
    """The functions that an answer may call; if ``required``, it has to call one.

    ``parallel`` allows several calls in one answer. ``answer`` is the Lark grammar of an answer
    without calls, if that is constrained, too.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True
    answer: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def is_free(self) -> bool:
        """True if the answer is unconstrained."""
        return not (self.required or self.answer or self.is_strict) and self.parallel

    @property
    def is_strict(self) -> bool:
        """True if the arguments of some function have to follow their schema."""
        return any(tool.strict for tool in self.tools)
