"""OpenAI's older fields ``functions`` and ``function_call``, translated to tools.

A request with these fields is served as one for tools with at most one call. Its answer has
``function_call`` in place of ``tool_calls``. Any conversation may have earlier messages of this
kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.http.api.openai.chat.messages import (
    ChatMessage,
    ChatTool,
    ChosenFunction,
    ChosenTool,
    MessageToolCall,
)
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.schema.field_names import FieldNames
from trioserve.protocol.errors import InvalidRequest

LEGACY_WORDS = FieldNames(
    (r"tools\[(\d+)\]\.function", r"functions[\1]"),
    (r"tool_choice(?:\.function)?", "function_call"),
    (r"tools", "functions"),
)
"""Field names of a request that has functions."""


def with_tools(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """Return ``request`` with tools in place of its functions.

    Raises:
        InvalidRequest: it has tools as well, or a ``function_call`` and no functions.
    """
    choice = request.function_call
    if not request.functions:
        if choice in (None, "none", "auto"):
            return request
        raise InvalidRequest("function_call needs functions", param="function_call")
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} and functions exclude each other", param=name)
    return msgspec.structs.replace(
        request,
        tools=[ChatTool(function=function) for function in request.functions],
        tool_choice=ChosenTool(function=choice) if isinstance(choice, ChosenFunction) else choice,
        parallel_tool_calls=False,
    )


def with_tool_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` with tool calls and tools' answers in place of those of functions.

    Raises:
        InvalidRequest: a message has both kinds of calls.
    """
    shown: list[ChatMessage] = []
    ids: dict[str | None, str] = {}
    for number, message in enumerate(messages):
        function = message.function_call
        if function is not None:
            if message.tool_calls:
                param = f"messages[{number}].function_call"
                raise InvalidRequest(f"{param} excludes tool_calls", param=param)
            # Nine letters and digits, as the templates of Mistral's models want them.
            ids[function.name] = f"call{number:05}"
            call = MessageToolCall(id=ids[function.name], function=function)
            message = msgspec.structs.replace(message, function_call=None, tool_calls=[call])
        elif message.role == "function":
            id = ids.get(message.name)
            message = msgspec.structs.replace(message, role="tool", tool_call_id=id)
        shown.append(message)
    return shown
