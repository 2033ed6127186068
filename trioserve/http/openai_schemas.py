"""The OpenAI API's requests and responses, with vLLM's additions, as classes.

The names and the meaning of the fields are theirs. Fields marked with
:func:`~trioserve.http.schemas.only` are known and refused; the others do what they say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.schemas import Count, Identifier, Seconds, TokenId, hint, only

__all__ = ["ChatCompletionRequest", "CompletionRequest"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, only(False)] = None
    include_obfuscation: Annotated[Any, only(False)] = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    priority: int | None = None
    request_id: Identifier | None = None
    cache_salt: str | None = None
    timeout: Seconds | None = None

    user: Annotated[Any, hint()] = None
    metadata: Annotated[Any, hint()] = None
    safety_identifier: Annotated[Any, hint()] = None
    prompt_cache_key: Annotated[Any, hint()] = None
    session_id: Annotated[Any, hint()] = None

    n: Annotated[Any, only(1)] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    structured_outputs: Annotated[Any, only()] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1.0)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    truncation_side: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    logprob_token_ids: Annotated[Any, only([])] = None
    allowed_token_ids: Annotated[Any, only()] = None
    bad_words: Annotated[Any, only([])] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None
    return_token_ids: Annotated[Any, only(False)] = None
    return_token_offsets: Annotated[Any, only(False)] = None
    thinking_token_budget: Annotated[Any, only()] = None
    stream_interval: Annotated[Any, only(1)] = None
    repetition_detection: Annotated[Any, only()] = None
    kv_transfer_params: Annotated[Any, only()] = None
    ec_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only({})] = None


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


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Count | None = None
    logprobs: Count | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only()] = None
    prompt_embeds: Annotated[Any, only()] = None


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageReply(msgspec.Struct):
    """What a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a completion, column by column."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    """One completion, or what an event of a stream adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a completion, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "trioserve"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    """The models that are served."""

    data: list[ModelCard]
    object: str = "list"
