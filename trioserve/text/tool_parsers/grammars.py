"""Grammars of answers with tool calls, one for each family, as Lark in llguidance's dialect.

A call has exactly the form that chat templates print, and its arguments are JSON of their schema.
If calls are optional, a lazy rule matches the text before a call up to its marker; after the marker
the answer can only be a call.
"""

from __future__ import annotations

import json

from trioserve.protocol.lark import GAP, HEADER, TEXT, TokenOf, head, json_rule, literal, nested
from trioserve.text.tool_parsers.tools import Tool, ToolUse

_TOOL_CALL = "<tool_call>"
_MARKER = "[TOOL_CALLS]"
_ANY_OBJECT = {"type": "object"}


def hermes_grammar(use: ToolUse, token_of: TokenOf, template: str) -> str:
    """Return the grammar of ``<tool_call>{…}</tool_call>``, several in a row or between texts."""
    body = f"GAP? object GAP? {literal('</tool_call>', token_of)}"
    return tagged_grammar(use, token_of, body, TEXT + _objects(use, "arguments"))


def tagged_grammar(use: ToolUse, token_of: TokenOf, body: str, rules: str) -> str:
    """Return the grammar of calls that begin with ``<tool_call>``, in a row or between texts.

    Args:
        body: Expression for the rest of a call.
        rules: Rules used by ``body``, and :data:`TEXT`.
    """
    rules = f"{HEADER}{GAP}{rules}call: {literal(_TOOL_CALL, token_of)} {body}\n"
    calls = "call (GAP? call)*" if use.parallel else "call"
    if use.required:
        return f"{rules}start: {calls}\n"
    if use.answer is not None:
        return f"{rules}start: {calls} | answer\nanswer: {nested(use.answer)}\n"
    tags = "tag* tail" if use.parallel else "tag | tail"
    return f"{rules}start: {tags}\ntag: head {body}\ntail: TEXT\n{head(_TOOL_CALL, token_of)}"


def llama3_grammar(use: ToolUse, token_of: TokenOf, template: str) -> str:
    """Return the grammar of ``{…}; {…}`` as the whole answer, optionally after the model's tag."""
    tag = token_of("<|python_tag|>")
    several = 'object (";" GAP? object)*' if use.parallel else "object"
    rules = HEADER + GAP + _objects(use, "parameters") + f"objects: {several}\n"
    calls = "objects" if tag is None else f"<[{tag}]>? objects"
    if use.required:
        return f"{rules}start: {calls}\n"
    if use.answer is not None:
        return f"{rules}start: {calls} | answer\nanswer: {nested(use.answer)}\n"
    later = "" if tag is None else f" | PLAIN <[{tag}]> objects"
    plain = "PLAIN: /\\s*[^{\\s](?s:.*)/\n"
    return f"{rules}start: {calls} | PLAIN?{later}\n{plain}"


def mistral_grammar(use: ToolUse, token_of: TokenOf, template: str) -> str:
    """Return the grammar of an array after the marker, or of ``name[ARGS]{…}``, by the template."""
    marker, args = literal(_MARKER, token_of), literal("[ARGS]", token_of)
    if "[ARGS]" in template:
        names = [
            f"bare_{number}: {json.dumps(tool.name)} {args} arguments_{number}\n"
            for number, tool in enumerate(use.tools)
        ]
        alternatives = " | ".join(f"bare_{number}" for number in range(len(use.tools)))
        body = f"body: {alternatives}\n{''.join(names)}{_arguments(use)}"
        several = use.parallel
    else:
        items = 'object ("," GAP? object)*' if use.parallel else "object"
        body = f'body: GAP? "[" {items} "]"\n{_objects(use, "arguments")}'
        several = False
    rules = f"{HEADER}{GAP}{body}call: {marker} body\n"
    calls = "call+" if several else "call"
    if use.required:
        return f"{rules}start: {calls}\n"
    if use.answer is not None:
        return f"{rules}start: {calls} | answer\nanswer: {nested(use.answer)}\n"
    tags = "tag* tail" if several else "tag | tail"
    return f"{rules}start: {tags}\ntag: head body\ntail: TEXT\n{TEXT}{head(_MARKER, token_of)}"


def json_grammar(use: ToolUse, token_of: TokenOf, template: str) -> str:
    """Return the grammar of an object, or a list of them, as the whole answer."""
    rules = HEADER + GAP + _objects(use, "arguments")
    calls = 'object | "[" object ("," GAP? object)* "]"' if use.parallel else "object"
    if use.required:
        return f"{rules}start: {calls}\n"
    if use.answer is not None:
        return f"{rules}start: {calls} | answer\nanswer: {nested(use.answer)}\n"
    return f"{rules}start: {calls} | PLAIN?\nPLAIN: /\\s*[^\\[{{\\s](?s:.*)/\n"


def _objects(use: ToolUse, key: str) -> str:
    """Return the rule ``object``: a call as a JSON object with its arguments under ``key``."""
    rules = []
    for number, tool in enumerate(use.tools):
        begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        rules.append(f'object_{number}: {json.dumps(begin)} arguments_{number} "}}"\n')
    alternatives = " | ".join(f"object_{number}" for number in range(len(use.tools)))
    return f"object: {alternatives}\n{''.join(rules)}{_arguments(use)}"


def _arguments(use: ToolUse) -> str:
    return "".join(
        f"arguments_{number}: {_schema_rule(tool, use.required)}\n"
        for number, tool in enumerate(use.tools)
    )


def _schema_rule(tool: Tool, required: bool) -> str:
    """Return the rule of the arguments: their schema if it is required, else any object."""
    if not (tool.strict or required):
        return json_rule(_ANY_OBJECT)
    schema = tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}
    return json_rule(schema, lenient=not tool.strict)
