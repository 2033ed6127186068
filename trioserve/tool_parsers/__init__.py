"""Tool calls: how each family of models writes them, read from text and held to by grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import attrs

from trioserve.lark import TokenOf
from trioserve.tool_parsers.base import MarkedParser, ToolParser
from trioserve.tool_parsers.events import ArgumentsDelta, Event, TextDelta, ToolCallStart
from trioserve.tool_parsers.grammars import (
    hermes_grammar,
    json_grammar,
    llama3_grammar,
    mistral_grammar,
)
from trioserve.tool_parsers.hermes import HermesParser
from trioserve.tool_parsers.json_objects import JsonParser
from trioserve.tool_parsers.llama3 import Llama3Parser
from trioserve.tool_parsers.mistral import MistralParser
from trioserve.tool_parsers.tools import Tool, ToolUse

__all__ = [
    "FAMILIES",
    "ArgumentsDelta",
    "Event",
    "Family",
    "TextDelta",
    "Tool",
    "ToolCallStart",
    "ToolParser",
    "ToolUse",
    "family_of_template",
]


@attrs.frozen
class Family:
    """A way to write tool calls.

    ``grammar`` takes how tools are to be used, the ids of tokens and the template's text.
    ``arguments`` is what a call's object has them under, ``join`` puts such objects together.
    """

    name: str
    parser: type[MarkedParser]
    grammar: Callable[[ToolUse, TokenOf, str], str]
    arguments: str
    join: Callable[[Sequence[str]], str]

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """An answer with ``calls``: names and arguments, these as JSON."""
        return self.join(
            [
                f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'
                for name, arguments in calls
            ]
        )


def _tagged(calls: Sequence[str]) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _in_array(calls: Sequence[str]) -> str:
    return f"[{', '.join(calls)}]"


def _one_or_array(calls: Sequence[str]) -> str:
    return calls[0] if len(calls) == 1 else _in_array(calls)


FAMILIES = {
    family.name: family
    for family in (
        Family("hermes", HermesParser, hermes_grammar, "arguments", _tagged),
        Family("llama3", Llama3Parser, llama3_grammar, "parameters", "; ".join),
        Family(
            "mistral",
            MistralParser,
            mistral_grammar,
            "arguments",
            lambda calls: "[TOOL_CALLS]" + _in_array(calls),
        ),
        Family("json", JsonParser, json_grammar, "arguments", _one_or_array),
    )
}


def family_of_template(template: str, *, knows_tools: bool) -> Family | None:
    """The family whose calls a chat template prints; None for one that isn't known here.

    Args:
        knows_tools: whether the template prints tools at all. For one that doesn't, the family is
            ``json``: it has to be told of tools in words, and so can be told how to call them.
    """
    if not knows_tools:
        return FAMILIES["json"]
    if "<tool_call>" in template:
        return FAMILIES["hermes"]
    if "[TOOL_CALLS]" in template:
        return FAMILIES["mistral"]
    if "<|python_tag|>" in template or _looks_like_llama3(template):
        return FAMILIES["llama3"]
    return None


def _looks_like_llama3(template: str) -> bool:
    return "<|start_header_id|>" in template and '"parameters"' in template
