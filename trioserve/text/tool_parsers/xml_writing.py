"""Writers and grammars of calls with a tag around each argument."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from trioserve.protocol.lark import TEXT, TokenOf, head, json_rule, spelled
from trioserve.text.tool_parsers.grammars import tagged_grammar
from trioserve.text.tool_parsers.tools import Tool, ToolUse
from trioserve.text.tool_parsers.xml import TagStyle
from trioserve.text.tool_parsers.xml_values import property_schema, types_of

_TAG = re.compile(r"(</?\w+>)")
_ANY_KEY = "KEY: /[^<>\\n]{1,128}/\n"
_OPEN = "<tool_call>"


def writer_in(style: TagStyle) -> Callable[[Sequence[tuple[str, str]]], str]:
    """Return a function that writes calls in ``style``."""
    return functools.partial(_written, style)


def grammar_in(style: TagStyle) -> Callable[[ToolUse, TokenOf, str], str]:
    """Return a function that makes the grammar of an answer with calls in ``style``."""
    return functools.partial(_grammar, style)


def _written(style: TagStyle, calls: Sequence[tuple[str, str]]) -> str:
    return "\n".join(_call(style, name, arguments) for name, arguments in calls)


def _call(style: TagStyle, name: str, arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):  # A client sent back a model's invalid arguments.
        values = {"arguments": arguments}
    parts = [style.before_name, name, style.after_name]
    for key, value in values.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts += [style.before_key, key, style.after_key]
        parts += [style.before_value, shown, style.after_value]
    return "".join([*parts, style.after_values])


def _grammar(style: TagStyle, use: ToolUse, token_of: TokenOf, template: str) -> str:
    writer = _Rules(style, token_of)
    bodies = [writer.body(number, tool, use.required) for number, tool in enumerate(use.tools)]
    alternatives = " | ".join(f"body_{number}" for number in range(len(use.tools)))
    rules = f"{TEXT}{_ANY_KEY}{writer.shared()}body: {alternatives}\n{''.join(bodies)}"
    return tagged_grammar(use, token_of, "body", rules)


class _Rules:
    """The grammar rules of functions' arguments."""

    def __init__(self, style: TagStyle, token_of: TokenOf) -> None:
        self._style = style
        self._token_of = token_of
        break_, mark, after = _TAG.split(style.after_value)
        self._break, self._mark, self._after = break_, mark, after

    def shared(self) -> str:
        """Return the rules for any text up to the end of a value, and for any argument."""
        style = self._style
        any_argument = " ".join(
            [
                *self._spelled(style.before_key),
                "KEY",
                *self._spelled(style.after_key + style.before_value),
                "until",
                *self._spelled(self._after),
            ]
        )
        until = head(self._mark, self._token_of, name="until")
        return f"{until}any_argument: {any_argument}\n"

    def body(self, number: int, tool: Tool, required: bool) -> str:
        """Return the rule of a call of ``tool``, after its opening tag."""
        style = self._style
        begin = style.before_name.removeprefix(_OPEN) + tool.name + style.after_name
        properties = tool.parameters.get("properties")
        if not (tool.strict or required) or not isinstance(properties, dict):
            names, rules = ["any_argument*"], list[str]()
        else:
            names, rules = self._arguments(number, tool, properties)
        parts = [*self._spelled(begin), *names, *self._spelled(style.after_values)]
        return f"body_{number}: {' '.join(parts)}\n{''.join(rules)}"

    def _arguments(
        self, number: int, tool: Tool, properties: dict[str, Any]
    ) -> tuple[list[str], list[str]]:
        """Return the expressions of a call's arguments, in the schema's order, and their rules."""
        wanted = tool.parameters.get("required")
        needed = set(wanted) if isinstance(wanted, list) else set()
        names, rules = [], []
        for index, key in enumerate(properties):
            name = f"argument_{number}_{index}"
            names.append(name if key in needed else f"{name}?")
            value = self._value(property_schema(tool.parameters, key), tool.strict)
            style = self._style
            begin = style.before_key + key + style.after_key + style.before_value
            parts = [*self._spelled(begin), *value, *self._spelled(self._after)]
            rules.append(f"{name}: {' '.join(parts)}\n")
        return names, rules

    def _value(self, schema: Any, strict: bool) -> list[str]:
        """Return the expression of a value and its closing mark.

        A string is free unless its schema lists values.
        """
        end = self._spelled(self._break + self._mark)
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
            return [f"({' | '.join(json.dumps(each) for each in choices)})", *end]
        types = types_of(schema)
        if not types or "string" in types:
            return ["until"]
        return [json_rule(dict(schema), lenient=not strict), *end]

    def _spelled(self, text: str) -> list[str]:
        return spelled(text, self._token_of)
