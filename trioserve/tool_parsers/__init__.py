"""Tool calls: how each family of models writes them, read from text and held to by grammars."""

from __future__ import annotations

from collections.abc import Callable

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
    ``example`` is a call as a model is told to write it whose template doesn't say how.
    """

    name: str
    parser: type[MarkedParser]
    grammar: Callable[[ToolUse, TokenOf, str], str]
    example: str


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "hermes",
            HermesParser,
            hermes_grammar,
            '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>',
        ),
        Family("llama3", Llama3Parser, llama3_grammar, '{"name": NAME, "parameters": ARGUMENTS}'),
        Family(
            "mistral",
            MistralParser,
            mistral_grammar,
            '[TOOL_CALLS][{"name": NAME, "arguments": ARGUMENTS}]',
        ),
        Family("json", JsonParser, json_grammar, '{"name": NAME, "arguments": ARGUMENTS}'),
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
