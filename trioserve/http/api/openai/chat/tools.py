"""Tools of a chat request: the allowed ones, whether one is required, and their syntax."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.messages import AllowedToolsChoice, ChatTool, ChosenTool
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.protocol.errors import InvalidRequest
from trioserve.text.tool_parsers import FAMILIES, Family, Tool, ToolUse


def tool_use(request: ChatCompletionRequest, format: ChatFormat) -> ToolUse | None:
    """Return how the answer may use tools; None if there are none to use.

    Raises:
        InvalidRequest: the choice is for tools that aren't given, two have the same name, or it
            isn't known how the model writes calls.
    """
    tools = tuple(_tool(tool) for tool in request.tools or ())
    choice = request.tool_choice
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            param = f"tools[{number}].function.name"
            raise InvalidRequest(f"{param} is {name!r}, as that of another tool", param=param)
    if choice == "none":
        return None
    if not tools:
        if choice in (None, "auto"):
            return None
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", param="tools")
    if format.family is None:
        raise InvalidRequest(
            "tools isn't served: it isn't known how this model writes calls. Start the server with "
            f'--tool-call-parser and one of {", ".join(FAMILIES)}, or give tool_choice "none"',
            param="tools",
            code="unsupported_parameter",
        )
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, ChosenTool):
        chosen = _chosen(tools, [choice.function.name], "tool_choice.function.name")
        return ToolUse(tools=chosen, required=True, parallel=False)
    required = choice == "required"
    if isinstance(choice, AllowedToolsChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        tools = _chosen(tools, allowed, "tool_choice.allowed_tools.tools")
        required = choice.allowed_tools.mode == "required"
    return ToolUse(tools=tools, required=required, parallel=parallel)


def template_tools(tools: list[ChatTool]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates print."""
    return [msgspec.to_builtins(tool) for tool in tools]


def instructions(tools: list[ChatTool], use: ToolUse, family: Family) -> str:
    """Return the instructions for a model with a chat template that doesn't print tools."""
    described = [json.dumps(tool["function"], ensure_ascii=False) for tool in template_tools(tools)]
    call = ("NAME", family.placeholder)
    parts = [
        "You can call functions. Each line describes one as JSON: its name, what it does, and the "
        "schema of its arguments.",
        *described,
        "To call a function, answer with nothing but the following, where NAME is its name and "
        f"{family.meaning}:",
        family.write([call]),
    ]
    if use.parallel:
        parts += ["To call several, answer like this:", family.write([call, call])]
    parts.append(
        "You have to call a function now."
        if use.required
        else "If no function helps, answer in plain words."
    )
    return "\n".join(parts)


def _tool(tool: ChatTool) -> Tool:
    function = tool.function
    strict = bool(function.strict)
    if not function.parameters:
        return Tool(function.name, strict=strict)
    return Tool(function.name, function.parameters, strict)


def _chosen(tools: tuple[Tool, ...], names: list[str], param: str) -> tuple[Tool, ...]:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"{param} names {name!r}, which is none of tools", param=param)
    return tuple(tool for tool in tools if tool.name in names)
