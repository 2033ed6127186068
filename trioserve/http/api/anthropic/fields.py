"""Translation of Anthropic's fields to a chat request's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trioserve.http.api.anthropic.inputs import (
    Base64Source,
    ImageInput,
    InputMessage,
    TextInput,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
)
from trioserve.http.api.anthropic.schemas import (
    AnyToolChoice,
    MessagesPrompt,
    MessagesRequest,
    NamedToolChoice,
    NoToolChoice,
    ThinkingAdaptive,
    ThinkingEnabled,
    ToolDefinition,
)
from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.messages import (
    ChatMessage,
    ChatTool,
    ChosenFunction,
    ChosenTool,
    FunctionDefinition,
    MessageFunction,
    MessageToolCall,
    NamedImage,
    Parts,
    TextPart,
)
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.thinking import thinking_fields
from trioserve.http.api.openai.structured_schemas import JsonSchema, JsonSchemaFormat
from trioserve.http.api.schema.field_names import FieldNames
from trioserve.protocol.errors import InvalidRequest

WORDS = FieldNames(
    (r"stop", "stop_sequences"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format(?:\.json_schema)?", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
)


def chat_request(request: MessagesPrompt, format: ChatFormat) -> ChatCompletionRequest:
    """Return ``request`` as a chat request.

    Raises:
        InvalidRequest: it asks for something that isn't served; ``param`` is a field of
            ``request``.
    """
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request),
        "tools": None if request.tools is None else [_tool(tool) for tool in request.tools],
        **_tool_choice(request),
        **_thinking(request, format),
        **_output(request),
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
        }
    return ChatCompletionRequest(
        continue_final_message=request.messages[-1].role == "assistant", **fields
    )


def _messages(request: MessagesPrompt) -> list[ChatMessage]:
    messages = []
    if request.system:
        messages.append(ChatMessage(role="system", content=_content(request.system)))
    for number, message in enumerate(request.messages):
        if message.role == "assistant":
            messages.append(_from_assistant(message, number))
        else:
            messages += _from_others(message, number)
    messages = _joined(messages)
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        param = f"messages[{len(request.messages) - 1}]"
        raise InvalidRequest(
            f"{param} calls tools: their results have to follow, as tool_result blocks of a user's "
            "message",
            param=param,
        )
    return messages


def _joined(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` with consecutive ones of the same role joined.

    Anthropic's API does the same, and many templates want users and assistants to take turns.
    """
    joined = messages[:1]
    for message in messages[1:]:
        before = joined[-1]
        if message.role != before.role or message.role not in ("user", "assistant"):
            joined.append(message)
            continue
        before.content = [*_parts(before), *_parts(message)]
        before.tool_calls = [*(before.tool_calls or ()), *(message.tool_calls or ())] or None
        thoughts = [each.reasoning_content for each in (before, message) if each.reasoning_content]
        before.reasoning_content = "\n".join(thoughts) or None
    return joined


def _parts(message: ChatMessage) -> Parts:
    content = message.content
    if isinstance(content, str):
        return [TextPart(text=content)] if content else []
    return content or []


def _from_others(message: InputMessage, number: int) -> list[ChatMessage]:
    """Return a user's text and the results of tools in ``message`` as separate messages."""
    role = message.role
    if isinstance(message.content, str):
        return [ChatMessage(role=role, content=message.content)]
    messages: list[ChatMessage] = []
    said: Parts = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextInput):
            said.append(TextPart(text=block.text))
            continue
        if isinstance(block, ImageInput) and role == "user":
            said.append(_image(block, f"messages[{number}].content[{index}]"))
            continue
        if role == "system" or not isinstance(block, ToolResultInput):
            raise _misplaced(block, role, number, index)
        if said:
            messages.append(ChatMessage(role=role, content=_joined_parts(said)))
            said = []
        messages.append(_result(block))
    if said or not messages:
        messages.append(ChatMessage(role=role, content=_joined_parts(said)))
    return messages


def _from_assistant(message: InputMessage, number: int) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage(role="assistant", content=message.content)
    said: list[TextInput] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextInput):
            said.append(block)
        elif isinstance(block, ThinkingInput):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseInput):
            function = MessageFunction(name=block.name, arguments=block.input)
            calls.append(MessageToolCall(id=block.id, function=function))
        else:
            raise _misplaced(block, message.role, number, index)
    answer = ChatMessage(role="assistant", content=_content(said))
    if thoughts:
        answer.reasoning_content = "\n".join(thoughts)
    if calls:
        answer.tool_calls = calls
    return answer


def _misplaced(block: msgspec.Struct, role: str, number: int, index: int) -> InvalidRequest:
    param = f"messages[{number}].content[{index}].type"
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"{param}: {kind} has no place in a message of {role}", param=param)


def _result(block: ToolResultInput) -> ChatMessage:
    content = _content(block.content or "")
    if block.is_error:
        parts: Parts = [TextPart(text=content)] if isinstance(content, str) else content
        content = [TextPart(text="Error:"), *parts]
    return ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)


def _content(given: str | Sequence[TextInput]) -> str | Parts:
    if isinstance(given, str):
        return given
    return _joined_parts([TextPart(text=block.text) for block in given])


def _joined_parts(parts: Parts) -> str | Parts:
    """Return a content as one text if possible, as every template prints that."""
    if not parts:
        return ""
    first = parts[0]
    return first.text if len(parts) == 1 and isinstance(first, TextPart) else parts


def _image(block: ImageInput, field: str) -> NamedImage:
    source = block.source
    url = source.data if isinstance(source, Base64Source) else source.url
    return NamedImage(image_url=url, field=field)


def _tool(tool: ToolDefinition) -> ChatTool:
    function = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return ChatTool(function=function)


def _tool_choice(request: MessagesPrompt) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, NoToolChoice):
        return {"tool_choice": "none"}
    if isinstance(choice, NamedToolChoice):
        return {"tool_choice": ChosenTool(function=ChosenFunction(name=choice.name))}
    return {
        "tool_choice": "required" if isinstance(choice, AnyToolChoice) else "auto",
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _thinking(request: MessagesPrompt, format: ChatFormat) -> dict[str, Any]:
    asked = request.thinking
    if asked is None:
        return {}
    if isinstance(asked, ThinkingEnabled):
        fields = thinking_fields(True, format, "thinking")
    elif isinstance(asked, ThinkingAdaptive):
        fields = thinking_fields(format.reasons or None, format, "thinking")
    else:
        return thinking_fields(False, format, "thinking")
    return {**fields, "include_reasoning": False} if asked.display == "omitted" else fields


def _output(request: MessagesPrompt) -> dict[str, Any]:
    config = request.output_config
    asked = None if config is None else config.format
    if asked is not None and request.output_format is not None:
        raise InvalidRequest(
            "output_format and output_config.format are the same: give one of them",
            param="output_format",
        )
    asked = asked or request.output_format
    schema = (
        None if asked is None else JsonSchemaFormat(json_schema=JsonSchema(schema=asked.schema))
    )
    return {
        "response_format": schema,
        "reasoning_effort": None if config is None else config.effort,
    }
