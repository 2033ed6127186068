"""Translation of Ollama's fields to a chat request's."""

from __future__ import annotations

import itertools
from typing import Any

from trioserve.http.api.errors import ModelNotFound
from trioserve.http.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    OllamaToolCall,
)
from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.messages import (
    ChatMessage,
    MessageFunction,
    MessageToolCall,
    NamedImage,
    Parts,
    TextPart,
)
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.thinking import thinking_fields
from trioserve.http.api.openai.structured_schemas import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
)
from trioserve.http.api.schema.field_names import FieldNames
from trioserve.http.api.service import Service
from trioserve.protocol.errors import InvalidRequest

_TAG = ":latest"
"""Tag that Ollama appends to a name without one."""
_SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}
"""Names of options, by the fields of a chat request."""
_NAMES = (
    *((name, f"options.{own}") for name, own in _SAMPLING.items()),
    (r"response_format(?:\.json_schema(?:\.schema)?)?", "format"),
    (r"reasoning_effort", "think"),
)
CHAT_WORDS = FieldNames(*_NAMES)
GENERATE_WORDS = FieldNames(("messages", "prompt"), *_NAMES)


def served_name(name: str | None, service: Service) -> str:
    """Return the served name that a request means.

    Raises:
        ModelNotFound: it isn't served here.
    """
    try:
        return service.model(name)
    except ModelNotFound:
        if name is None or not name.endswith(_TAG):
            raise
        return service.model(name.removesuffix(_TAG))


def ollama_chat_request(
    request: OllamaChatRequest, model: str, format: ChatFormat
) -> ChatCompletionRequest:
    """Return ``request``, which means ``model``, as a chat request.

    Raises:
        InvalidRequest: it asks for something that isn't served; ``param`` is a field of
            ``request``.
    """
    return ChatCompletionRequest(
        messages=_messages(request.messages or []),
        tools=request.tools,
        **_fields(request, model),
        **_thinking(request, format),
    )


def generate_request(
    request: OllamaGenerateRequest, model: str, format: ChatFormat
) -> ChatCompletionRequest:
    """Return ``request``, which isn't raw and means ``model``, as a chat request."""
    content = _content(request.prompt, request.images, "images")
    messages = [ChatMessage(role="user", content=content)]
    if request.system:
        messages.insert(0, ChatMessage(role="system", content=request.system))
    return ChatCompletionRequest(
        messages=messages, **_fields(request, model), **_thinking(request, format)
    )


def _content(text: str | None, images: list[str] | None, field: str) -> str | Parts:
    if not images:
        return text or ""
    parts: Parts = [
        NamedImage(image_url=image, field=f"{field}[{index}]") for index, image in enumerate(images)
    ]
    return [*parts, TextPart(text=text)] if text else parts


def raw_request(request: OllamaGenerateRequest, model: str) -> ChatCompletionRequest:
    """Return a chat request without messages that says how to continue a raw prompt.

    Raises:
        InvalidRequest: it has a field that is for the template.
    """
    for name in ("system", "think"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} needs a chat template, so not raw", param=name)
    return ChatCompletionRequest(messages=[], **_fields(request, model))


def _fields(request: OllamaRequest, model: str) -> dict[str, Any]:
    options = request.options
    fields = {
        name: None if options is None else getattr(options, own) for name, own in _SAMPLING.items()
    }
    if fields["max_tokens"] is not None and fields["max_tokens"] < 0:
        fields["max_tokens"] = None
    if fields["seed"] == -1:
        fields["seed"] = None
    return {
        **fields,
        "model": model,
        "response_format": _response_format(request),
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
    }


def _response_format(request: OllamaRequest) -> ResponseFormat | None:
    if request.format == "json":
        return JsonObjectFormat()
    if isinstance(request.format, dict):
        return JsonSchemaFormat(json_schema=JsonSchema(schema=request.format))
    return None


def _thinking(request: OllamaRequest, format: ChatFormat) -> dict[str, Any]:
    think = request.think
    if not isinstance(think, str):
        return thinking_fields(think, format, "think")
    fields = thinking_fields(True, format, "think")
    return (
        {**fields, "reasoning_effort": think} if "reasoning_effort" in format.variables else fields
    )


def _messages(given: list[OllamaMessage]) -> list[ChatMessage]:
    """Return messages as chats have them: each call has an id, and its answer the same."""
    messages = []
    numbers = itertools.count()
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(given):
        content = _content(message.content, message.images, f"messages[{index}].images")
        shown = ChatMessage(role=message.role, content=content)
        if message.thinking is not None:
            shown.reasoning_content = message.thinking
        if message.tool_calls:
            shown.tool_calls = [_call(call, next(numbers)) for call in message.tool_calls]
            waiting += [(call.id or "", call.function.name) for call in shown.tool_calls]
        if message.role == "tool":
            shown.tool_call_id = _answered(message, waiting)
            shown.name = message.tool_name
        messages.append(shown)
    return messages


def _call(call: OllamaToolCall, number: int) -> MessageToolCall:
    function = MessageFunction(name=call.function.name, arguments=call.function.arguments or {})
    # Nine letters and digits, as the templates of Mistral's models want them.
    return MessageToolCall(id=call.id or f"call{number:05}", function=function)


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]]) -> str | None:
    """Remove the call that ``message`` answers from ``waiting`` and return its id; None if none
    waits.
    """
    for call in waiting:
        id, name = call
        if message.tool_call_id == id or (
            message.tool_call_id is None and message.tool_name in (None, name)
        ):
            waiting.remove(call)
            return id
    return message.tool_call_id
