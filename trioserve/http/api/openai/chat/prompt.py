"""Translation of a chat request's messages and arguments to the rendered prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.legacy import with_tool_calls
from trioserve.http.api.openai.chat.messages import (
    AudioUrlPart,
    ChatMessage,
    EmbedsPart,
    ImageUrlPart,
    InputAudioPart,
    MessageToolCall,
    NamedImage,
    Part,
    RefusalPart,
    TextPart,
    VideoUrlPart,
)
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.thinking import SWITCHES, no_effort_arguments
from trioserve.http.api.openai.chat.tools import instructions, template_tools
from trioserve.http.api.prompt_embeds import decode_embeddings
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded_parts import PART_TYPE
from trioserve.requests.prompts import ChatPrompt
from trioserve.text.tool_parsers import FAMILIES, ToolUse

_OWN_FIELDS = frozenset(
    {"messages", "tools", "documents", "reasoning_effort", "add_generation_prompt"}
)
"""Template variables for which the request has fields of its own; no other field may set them."""


def chat_prompt(
    request: ChatCompletionRequest, format: ChatFormat, use: ToolUse | None
) -> ChatPrompt:
    """Return the prompt of ``request``; ``use`` tells how tools are to be used.

    Raises:
        InvalidRequest: the template never reads an argument, two fields contradict each other, or
            embeddings can't be read.
    """
    messages = template_messages(request.messages, format)
    arguments = _template_arguments(request, format)
    if use is not None and request.tools:
        if format.knows_tools:
            arguments["tools"] = template_tools(request.tools)
        else:
            assert format.family is not None
            _instruct(messages, instructions(request.tools, use, format.family))
    return ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=_add_generation_prompt(request),
        continue_final_message=bool(request.continue_final_message),
        template_arguments=arguments,
        mm_processor_kwargs=request.mm_processor_kwargs or {},
        media_io_kwargs=request.media_io_kwargs or {},
    )


def embeds_characters(messages: Sequence[ChatMessage]) -> int:
    """Return the characters of embeddings in base64, which take long to decode."""
    parts = (
        part
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )
    return sum(len(part.prompt_embeds) for part in parts if isinstance(part, EmbedsPart))


def template_messages(messages: Sequence[ChatMessage], format: ChatFormat) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates.

    Parts are text, ``reasoning`` has both of its names, and ``developer`` becomes ``system`` for a
    template that doesn't know it. For a template that doesn't know tools, calls become the model's
    text, and their results the user's text.

    Raises:
        InvalidRequest: a message has both kinds of calls.
    """
    shown: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    results: list[str] = []
    for index, message in enumerate(with_tool_calls(messages)):
        fields = _template_fields(message, format, f"messages[{index}]")
        for call in message.tool_calls or ():
            names[call.id] = call.function.name
        if message.role == "tool" and not format.knows_tools:
            results.append(_result_text(fields, names.get(message.tool_call_id)))
            continue
        _show_results(results, shown)
        shown.append(fields)
    _show_results(results, shown)
    return shown


def _show_results(results: list[str], shown: list[dict[str, Any]]) -> None:
    """Move consecutive results into one message."""
    if results:
        shown.append({"role": "user", "content": "\n\n".join(results)})
        results.clear()


def _template_fields(message: ChatMessage, format: ChatFormat, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    fields.pop("provider_specific_fields", None)
    if message.role == "developer" and "developer" not in format.template:
        fields["role"] = "system"
    if isinstance(message.content, list):
        fields["content"] = [
            _template_part(part, f"{name}.content[{index}]", message.role)
            for index, part in enumerate(message.content)
        ]
    reasoning = message.reasoning or message.reasoning_content
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    for call in fields.get("tool_calls", ()):
        for name in [name for name, value in call.items() if value is None]:
            del call[name]
    if message.tool_calls and not format.knows_tools:
        del fields["tool_calls"]
        fields["content"] = _with_calls(fields, message.tool_calls, format)
    return fields


def _template_part(part: Part, name: str, role: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    if role != "user":
        raise InvalidRequest(
            f"{name}: {type(part).__struct_config__.tag} parts are served in messages of the role "
            f"user, got {role}",
            param=name,
        )
    if isinstance(part, ImageUrlPart):
        field = part.field if isinstance(part, NamedImage) else name
        return {"type": "image_url", "image_url": part.url, "name": field}
    if isinstance(part, InputAudioPart | AudioUrlPart):
        return {"type": "audio", "audio": part.source, "name": name}
    if isinstance(part, VideoUrlPart):
        return {"type": "video", "video": part.source, "name": name}
    embeddings = decode_embeddings(part.prompt_embeds, f"{name}.prompt_embeds")
    return {"type": PART_TYPE, PART_TYPE: embeddings}


def _with_calls(fields: dict[str, Any], calls: list[MessageToolCall], format: ChatFormat) -> str:
    """Return an earlier answer's text with its calls, as the model was told to write them."""
    family = format.family or FAMILIES["json"]
    pairs = [(call.function.name, _arguments_text(call)) for call in calls]
    text = _text_of(fields)
    written = family.write(pairs)
    return f"{text}\n{written}" if text else written


def _arguments_text(call: MessageToolCall) -> str:
    given = call.function.arguments
    if isinstance(given, str) and given.strip():
        return given
    return json.dumps(given or {}, ensure_ascii=False)


def _result_text(fields: dict[str, Any], name: str | None) -> str:
    what = "The function" if name is None else f"The function {name}"
    return f"{what} returned:\n{_text_of(fields)}"


def _text_of(fields: dict[str, Any]) -> str:
    content = fields.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _instruct(messages: list[dict[str, Any]], text: str) -> None:
    """Put ``text`` into the system message, or before all others."""
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text})
        return
    before = _text_of(messages[0])
    messages[0] = {**messages[0], "content": f"{before}\n\n{text}" if before else text}


def _template_arguments(request: ChatCompletionRequest, format: ChatFormat) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        param = f"chat_template_kwargs.{name}"
        if name in _OWN_FIELDS:
            raise InvalidRequest(f"{param}: there is a field {name} for it", param=param)
        _set(arguments, name, value, param, format)
    if request.enable_thinking is not None:
        if arguments.get("enable_thinking", request.enable_thinking) != request.enable_thinking:
            raise InvalidRequest(
                "enable_thinking and chat_template_kwargs.enable_thinking differ; give one of them",
                param="enable_thinking",
            )
        _set(arguments, "enable_thinking", request.enable_thinking, "enable_thinking", format)
    if request.documents:
        _set(arguments, "documents", request.documents, "documents", format)
    effort = request.reasoning_effort
    no_effort = no_effort_arguments(format) if effort == "none" else None
    if no_effort is not None:
        arguments = {**no_effort, **arguments}
    elif effort is not None:
        _set(arguments, "reasoning_effort", effort, "reasoning_effort", format)
    return arguments


def _set(arguments: dict[str, Any], name: str, value: Any, param: str, format: ChatFormat) -> None:
    """Add a template's argument, unless it turns off reasoning of a model that never reasons."""
    known = not format.template or name in format.variables
    if not known and name in SWITCHES and value is False and not format.reasons:
        return
    if not known:
        raise InvalidRequest(
            f"{param} isn't served: the model's chat template never looks at {name}",
            param=param,
            code="unsupported_parameter",
        )
    arguments[name] = value


def _add_generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "continue_final_message excludes add_generation_prompt", param="continue_final_message"
        )
    return request.add_generation_prompt
