"""Translation of a request for a response to a chat.

The items of a response become messages, its fields a chat's. Errors of the chat are translated to
the fields of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from trioserve.http.api.openai.chat.messages import (
    AllowedTool,
    AllowedTools,
    AllowedToolsChoice,
    ChatMessage,
    ChatTool,
    ChosenFunction,
    ChosenTool,
    FunctionDefinition,
    MessageFunction,
    MessageToolCall,
    NamedImage,
    Part,
    Parts,
    RefusalPart,
    TextPart,
    ToolChoice,
)
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.responses.items import (
    CallItem,
    CallOutputItem,
    ContentPart,
    InputImage,
    InputItem,
    MessageItem,
    ReasoningItem,
)
from trioserve.http.api.openai.responses.schemas import (
    LOGPROBS,
    AllowedFunctions,
    ChosenFunctionTool,
    FunctionTool,
    NamedSchemaFormat,
    ResponsesRequest,
)
from trioserve.http.api.openai.structured_schemas import (
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
)
from trioserve.http.api.schema.field_names import FieldNames
from trioserve.protocol.errors import InvalidRequest

_OwnToolChoice = Literal["none", "auto", "required"] | ChosenFunctionTool | AllowedFunctions | None
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "vllm_xargs", "structured_outputs"),
    *("parallel_tool_calls", "chat_template_kwargs", "priority", "cache_salt", "extra_key"),
    *("timeout", "top_logprobs", "mm_processor_kwargs", "media_io_kwargs"),
)
"""Fields that a chat has, too."""
WORDS = FieldNames(
    (r"response_format(?:\.json_schema)?", "text.format"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.(?:function|allowed_tools)", "tool_choice"),
    (r"max_(?:completion_)?tokens", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"messages", "input"),
)
"""Field names of a request for a response."""


def chat_request(request: ResponsesRequest, history: Sequence[InputItem]) -> ChatCompletionRequest:
    """Return the chat of ``request``, after the items of ``history``.

    Raises:
        InvalidRequest: ``top_logprobs`` is given, and ``include`` asks for none.
    """
    if request.top_logprobs and not includes_logprobs(request):
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
    messages = chat_messages([*history, *input_items(request)], len(history))
    if request.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    return ChatCompletionRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=includes_logprobs(request) or None,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_tool_choice(request.tool_choice),
        response_format=_response_format(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **{name: getattr(request, name) for name in _SAME},
    )


def input_items(request: ResponsesRequest) -> list[InputItem]:
    """Return the items of a request's own input; a text is a user's message."""
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)]
    return request.input


def includes_logprobs(request: ResponsesRequest) -> bool:
    """Return whether the request asks for log-probabilities."""
    return LOGPROBS in (request.include or ())


def chat_messages(items: Iterable[InputItem], num_before: int = 0) -> list[ChatMessage]:
    """Return the messages of items, of which ``num_before`` are of earlier responses.

    Reasoning, the text after it, and the calls after that are one message of the assistant's.
    """
    said = _Said()
    for index, item in enumerate(items, -num_before):
        field = f"input[{index}].content" if index >= 0 else "previous_response_id"
        if isinstance(item, ReasoningItem):
            said.reason("".join(part.text for part in item.content or ()))
        elif isinstance(item, CallItem):
            said.call(item)
        elif isinstance(item, CallOutputItem):
            content = _content(item.output, field)
            said.other(ChatMessage(role="tool", tool_call_id=item.call_id, content=content))
        elif item.role == "assistant":
            said.answer(_content(item.content, field))
        else:
            said.other(ChatMessage(role=item.role, content=_content(item.content, field)))
    return said.all()


@attrs.define(eq=False)
class _Said:
    """Builder of messages."""

    _messages: list[ChatMessage] = attrs.field(factory=list)
    _open: ChatMessage | None = None
    """The assistant's message, while calls may still join it."""
    _reasoning: str = ""
    """Reasoning of the assistant's next message."""

    def reason(self, text: str) -> None:
        self._open = None
        self._reasoning += text

    def answer(self, content: _ChatContent) -> None:
        if self._open is not None and (self._open.content or self._open.tool_calls):
            self._open = None
        self._assistant().content = content

    def call(self, item: CallItem) -> None:
        message = self._assistant()
        function = MessageFunction(name=item.name, arguments=item.arguments)
        call = MessageToolCall(id=item.call_id, function=function)
        message.tool_calls = [*(message.tool_calls or ()), call]

    def other(self, message: ChatMessage) -> None:
        self._flush()
        self._open = None
        self._messages.append(message)

    def all(self) -> list[ChatMessage]:
        self._flush()
        return self._messages

    def _assistant(self) -> ChatMessage:
        if self._open is None:
            self._open = ChatMessage(role="assistant", content=None)
            if self._reasoning:
                self._open.reasoning_content, self._reasoning = self._reasoning, ""
            self._messages.append(self._open)
        return self._open

    def _flush(self) -> None:
        """Make a message of reasoning that was cut off before any text."""
        if self._reasoning:
            self._assistant().content = ""


_ChatContent = str | Parts


def _content(given: str | Sequence[ContentPart], field: str) -> _ChatContent:
    if isinstance(given, str):
        return given
    parts: Parts = [
        _chat_part(part, f"{field}[{index}]" if "[" in field else field)
        for index, part in enumerate(given)
    ]
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts


def _chat_part(part: ContentPart, field: str) -> Part:
    if isinstance(part, RefusalPart):
        return part
    if isinstance(part, InputImage):
        return NamedImage(image_url=part.image_url, field=field)
    return TextPart(text=part.text)


def _tool(tool: FunctionTool) -> ChatTool:
    return ChatTool(
        function=FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _tool_choice(choice: _OwnToolChoice) -> ToolChoice | None:
    if isinstance(choice, ChosenFunctionTool):
        return ChosenTool(function=ChosenFunction(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        tools = [AllowedTool(function=ChosenFunction(name=tool.name)) for tool in choice.tools]
        return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    given = None if request.text is None else request.text.format
    if isinstance(given, NamedSchemaFormat):
        return JsonSchemaFormat(json_schema=JsonSchema(name=given.name, schema=given.schema))
    return given
