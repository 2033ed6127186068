"""Requests and responses of ``/v1/chat/completions``, as classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.openai_schemas import GenerationRequest, UsageReply
from trioserve.http.schemas import Count, hint, only

__all__ = ["ChatCompletionChunk", "ChatCompletionRequest", "ChatCompletionResponse"]


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One message of a conversation; the chat template sees every field that is given.

    Fields that are null are as good as left out, but for the content.
    """

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[TextPart] | UnsetType | None = UNSET
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class ChatCompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, hint()] = None
    store: Annotated[Any, only(False)] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    include_reasoning: Annotated[Any, only(True)] = None
    verbosity: Annotated[Any, only()] = None
    echo: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None
    documents: Annotated[Any, only([])] = None
    chat_template: Annotated[Any, only()] = None
    media_io_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    return_prompt_text: Annotated[Any, only(False)] = None
    return_assistant_tokens_mask: Annotated[Any, only(False)] = None


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token of the answer, and those that could have been in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of an answer."""

    content: list[ChatLogprob]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    role: str = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a chat completion that isn't streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """One answer's part in a chunk of a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | UnsetType | None = UNSET
