"""Tool calls: parsers, grammars and writers of the syntax of each model family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import attrs

from trioserve.protocol.lark import TokenOf
from trioserve.text.tool_parsers.base import MarkedParser
from trioserve.text.tool_parsers.base import ToolParser as ToolParser
from trioserve.text.tool_parsers.events import ArgumentsDelta as ArgumentsDelta
from trioserve.text.tool_parsers.events import Event as Event
from trioserve.text.tool_parsers.events import TextPiece as TextPiece
from trioserve.text.tool_parsers.events import ToolCallStart as ToolCallStart
from trioserve.text.tool_parsers.grammars import (
    hermes_grammar,
    json_grammar,
    llama3_grammar,
    mistral_grammar,
)
from trioserve.text.tool_parsers.hermes import HermesParser
from trioserve.text.tool_parsers.json_objects import JsonParser
from trioserve.text.tool_parsers.llama3 import Llama3Parser
from trioserve.text.tool_parsers.mistral import MistralParser
from trioserve.text.tool_parsers.tools import Tool as Tool
from trioserve.text.tool_parsers.tools import ToolUse as ToolUse
from trioserve.text.tool_parsers.xml import GLM, QWEN3_CODER, GlmParser, Qwen3CoderParser, TagStyle
from trioserve.text.tool_parsers.xml_writing import grammar_in, writer_in

Calls = Sequence[tuple[str, str]]
"""Calls as pairs of name and arguments, the latter as JSON."""


@attrs.frozen
class Family:
    """A syntax of tool calls.

    ``grammar`` takes a :class:`ToolUse`, the function for token ids and the template's text.
    ``write`` writes an answer with calls. ``placeholder`` replaces arguments in a description for
    the model, and ``meaning`` explains it.
    """

    name: str
    parser: type[MarkedParser]
    grammar: Callable[[ToolUse, TokenOf, str], str]
    write: Callable[[Calls], str]
    placeholder: str = "ARGUMENTS"
    meaning: str = "ARGUMENTS is a JSON object"


def _objects(key: str, join: Callable[[Sequence[str]], str]) -> Callable[[Calls], str]:
    """Return a function that writes each call as an object with its arguments under ``key``."""

    def write(calls: Calls) -> str:
        return join(
            [f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}' for name, arguments in calls]
        )

    return write


def _tagged(calls: Sequence[str]) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _in_array(calls: Sequence[str]) -> str:
    return f"[{', '.join(calls)}]"


def _one_or_array(calls: Sequence[str]) -> str:
    return calls[0] if len(calls) == 1 else _in_array(calls)


def _in_tags(name: str, parser: type[MarkedParser], style: TagStyle) -> Family:
    return Family(
        name,
        parser,
        grammar_in(style),
        writer_in(style),
        '{"PARAMETER": "VALUE"}',
        "each argument is a PARAMETER with its VALUE",
    )


FAMILIES = {
    family.name: family
    for family in (
        Family("hermes", HermesParser, hermes_grammar, _objects("arguments", _tagged)),
        Family("llama3", Llama3Parser, llama3_grammar, _objects("parameters", "; ".join)),
        Family(
            "mistral",
            MistralParser,
            mistral_grammar,
            _objects("arguments", lambda calls: "[TOOL_CALLS]" + _in_array(calls)),
        ),
        _in_tags("qwen3_coder", Qwen3CoderParser, QWEN3_CODER),
        _in_tags("glm45", GlmParser, GLM),
        Family("json", JsonParser, json_grammar, _objects("arguments", _one_or_array)),
    )
}

_OTHER_TAG = re.compile(r"<tool_call>(?:\\n|\s)*<\w")
"""Call in tags that isn't a JSON object."""


def family_of_template(template: str, *, knows_tools: bool) -> Family | None:
    """Return the family of the calls that a chat template prints; None if it is unknown.

    Args:
        knows_tools: True if the template prints tools at all. If it doesn't, the family is
            ``json``: a system message has to describe the tools, and can describe the calls as
            well.
    """
    if not knows_tools:
        return FAMILIES["json"]
    if "<function=" in template and "<parameter=" in template:
        return FAMILIES["qwen3_coder"]
    if "<arg_key>" in template and "<arg_value>" in template:
        return FAMILIES["glm45"]
    if _OTHER_TAG.search(template):
        return None
    if "<tool_call>" in template:
        return FAMILIES["hermes"]
    if "[TOOL_CALLS]" in template:
        return FAMILIES["mistral"]
    if "<|python_tag|>" in template or _looks_like_llama3(template):
        return FAMILIES["llama3"]
    return None


def _looks_like_llama3(template: str) -> bool:
    return "<|start_header_id|>" in template and '"parameters"' in template
