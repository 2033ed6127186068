"""Requests and responses of ``/v1/chat/completions``, as classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.openai.chat.messages import (
    MAX_PARTS,
    MAX_TOOLS,
    ChosenFunction,
    FunctionDefinition,
    Messages,
    TextPart,
    ToolChoice,
    Tools,
)
from trioserve.http.api.openai.schemas import GenerationRequest, PromptLogprobReply, UsageReply
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Count, about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal

MAX_DOCUMENTS = 1024


class PredictedContent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text that the answer is expected to repeat in part."""

    type: Annotated[Literal["content"], about("Always `content`.")]
    content: Annotated[
        Text | Annotated[list[TextPart], msgspec.Meta(max_length=MAX_PARTS)],
        about("The text, or parts that are put together."),
    ]

    @property
    def text(self) -> str:
        """The whole text."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatCompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[Messages, about("The conversation so far.")]
    max_tokens: Annotated[
        Count | None,
        about("Most tokens of an answer; by default the server's default, or as many as fit."),
    ] = None
    max_completion_tokens: Annotated[
        Count | None, about("OpenAI's newer name of `max_tokens`; reasoning counts.")
    ] = None
    logprobs: Annotated[
        bool | None, about("Return the log-probabilities of the answer's tokens.")
    ] = None
    top_logprobs: Annotated[
        Count | None, about("Number of most probable tokens to return in each one's place.")
    ] = None

    tools: Tools = None
    tool_choice: Annotated[
        ToolChoice | None,
        about(
            "`none`: tools are left out of the prompt. `auto`: the model decides. `required`, "
            "or a function: a grammar makes it call one, or this one. `auto` by default if "
            "there are tools."
        ),
    ] = None
    parallel_tool_calls: fields.ParallelToolCalls = None

    functions: Annotated[
        Annotated[list[FunctionDefinition], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        about("OpenAI's older form of `tools`; an answer has at most one call."),
    ] = None
    function_call: Annotated[
        Literal["none", "auto"] | ChosenFunction | None,
        about("OpenAI's older form of `tool_choice`; a named function has to be called."),
    ] = None

    reasoning_effort: fields.ReasoningEffort = None
    enable_thinking: Annotated[
        bool | None, about("The same as `chat_template_kwargs.enable_thinking`.")
    ] = None
    include_reasoning: Annotated[
        bool | None, about("If false, reasoning is left out of the answer.")
    ] = None
    separate_reasoning: Annotated[
        bool | None, about("If false, reasoning stays in the content with its marks, as in SGLang.")
    ] = None
    documents: Annotated[
        Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_DOCUMENTS)] | None,
        about("For the chat template; refused if the template ignores them."),
    ] = None
    chat_template_kwargs: fields.ChatTemplateArguments = None
    add_generation_prompt: Annotated[
        bool | None, about("Let the prompt end with the beginning of an answer; true by default.")
    ] = None
    continue_final_message: Annotated[
        bool | None, about("Continue the last message instead of answering it.")
    ] = None
    echo: Annotated[
        bool | None, about("Begin the content with the last message's, if it has the same role.")
    ] = None
    return_prompt_text: Annotated[
        bool | None, about("Return the prompt as the chat template has written it.")
    ] = None

    prediction: Annotated[
        PredictedContent | None,
        about(
            "Text that the answer is expected to repeat in part. A server that drafts tokens "
            "drafts from it; the answer doesn't depend on it."
        ),
    ] = None

    mm_processor_kwargs: fields.MediaProcessorArguments = None
    media_io_kwargs: fields.MediaReadingArguments = None

    session_params: Annotated[Any, only({}, refusal=Refusal.PROMPT_PARTS)] = None
    store: Annotated[Any, only(False, refusal=Refusal.STORED_CHATS)] = None
    modalities: Annotated[Any, only(["text"], refusal=Refusal.MEDIA)] = None
    audio: Annotated[Any, only(refusal=Refusal.MEDIA)] = None
    use_audio_in_video: Annotated[Any, only(False, refusal=Refusal.MEDIA)] = None
    max_dynamic_patch: Annotated[Any, only(refusal=Refusal.MEDIA)] = None
    min_dynamic_patch: Annotated[Any, only(refusal=Refusal.MEDIA)] = None
    web_search_options: Annotated[Any, only(refusal=Refusal.WEB_SEARCH)] = None
    verbosity: Annotated[Any, only(refusal=Refusal.TEMPLATE_ARGUMENT)] = None
    task: Annotated[Any, only(refusal=Refusal.TEMPLATE_ARGUMENT)] = None
    stream_reasoning: Annotated[Any, only(True, refusal=Refusal.HELD_BACK_REASONING)] = None
    add_special_tokens: Annotated[Any, only(False, refusal=Refusal.ADDED_SPECIAL_TOKENS)] = None
    chat_template: Annotated[Any, only(refusal=Refusal.TEMPLATES_AS_PROGRAMS)] = None
    input_ids: Annotated[Any, only(refusal=Refusal.CHATS_OF_IDS)] = None
    return_prompt_token_ids: Annotated[Any, only(False, refusal=Refusal.SEPARATE_PROMPT_IDS)] = None
    return_assistant_tokens_mask: Annotated[Any, only(False, refusal=Refusal.ASSISTANT_MASKS)] = (
        None
    )
    return_meta_info: Annotated[Any, only(False, refusal=Refusal.CHAT_META_INFO)] = None
    moderation: Annotated[Any, only(refusal=Refusal.MODERATION)] = None
    prompt_cache_options: Annotated[Any, hint()] = None


class TopLogprob(msgspec.Struct):
    """A token that was possible in a place of the answer."""

    token: Annotated[str, about("Its text.")]
    logprob: Annotated[float, about("The natural logarithm of its probability.")]
    bytes: Annotated[list[int], about("Its bytes, since a token may be a part of a character.")]


class ChatLogprob(msgspec.Struct):
    """A token of the answer, and the most probable tokens in its place."""

    token: Annotated[str, about("Its text.")]
    logprob: Annotated[float, about("The natural logarithm of its probability.")]
    bytes: Annotated[list[int], about("Its bytes, since a token may be a part of a character.")]
    top_logprobs: Annotated[list[TopLogprob], about("The most probable tokens in its place.")]


class ChatLogprobs(msgspec.Struct):
    """The tokens of an answer, reasoning and tool calls included."""

    content: Annotated[list[ChatLogprob], about("One entry for each token.")]
    refusal: Annotated[None, about("Always null.")] = None


class FunctionCall(msgspec.Struct):
    """The function that is called, and its arguments: JSON, if the model wrote it well."""

    name: Annotated[str, about("The function's name.")]
    arguments: Annotated[str, about("JSON as the model wrote it.")]


class ToolCall(msgspec.Struct):
    """A call that the answer asks for."""

    id: Annotated[str, about("The name that the tool's answer refers to.")]
    function: Annotated[FunctionCall, about("The function to call, with its arguments.")]
    type: Annotated[str, about("Always `function`.")] = "function"


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer. ``reasoning`` and ``reasoning_content`` are the same, if there is any."""

    role: Annotated[str, about("The role of the message's author.")] = "assistant"
    content: Annotated[str | None, about("The text; null if the answer is tool calls alone.")]
    refusal: Annotated[str | None, about("Always null.")] = None
    reasoning: Annotated[
        str | UnsetType, about("Reasoning before the answer, without the marks.")
    ] = UNSET
    reasoning_content: Annotated[str | UnsetType, about("The reasoning, by its older name.")] = (
        UNSET
    )
    tool_calls: Annotated[
        list[ToolCall] | UnsetType, about("Tools that the model wants called.")
    ] = UNSET
    function_call: Annotated[
        FunctionCall | UnsetType, about("The call, where the request has `functions`.")
    ] = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: Annotated[int, about("The number of the output, from 0.")]
    message: Annotated[AssistantMessage, about("The answer.")]
    logprobs: Annotated[ChatLogprobs | None, about("Log-probabilities, if asked for.")]
    finish_reason: Annotated[
        str, about("`stop`, `length`, `tool_calls`, `function_call`, or `abort`.")
    ]
    stop_reason: Annotated[
        int | str | None,
        about("The stop string or stop token that ended it; null for the model's own end."),
    ]
    matched_stop: Annotated[
        int | str | None, about("The same, with the model's own end, as in SGLang.")
    ] = None
    token_ids: Annotated[
        list[int] | UnsetType, about("The tokens, if `return_token_ids` asks for them.")
    ] = UNSET
    cumulative_logprob: Annotated[float | UnsetType, fields.BEAM_LOGPROB] = UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a chat completion that isn't streamed."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    object: Annotated[str, about("Always `chat.completion`.")] = "chat.completion"
    created: Annotated[int, about("Time of creation, in Unix seconds.")]
    model: Annotated[str, about("The name that the model is served under.")]
    choices: Annotated[list[ChatChoice], about("The answers, `n` of them.")]
    usage: Annotated[UsageReply, about("Tokens that were used.")]
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprobReply] | None] | None,
        about("For each token of the prompt, log-probabilities by token id; null for the first."),
    ] = None
    prompt_token_ids: Annotated[
        list[int] | None, about("The prompt's tokens as the model saw them, if asked for.")
    ] = None
    prompt_text: Annotated[
        str | UnsetType, about("The prompt as the chat template wrote it, if asked for.")
    ] = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """A chunk's addition to a call's function: its name, once, and then pieces of arguments."""

    name: Annotated[str | None, about("The function's name, in the first part.")] = None
    arguments: Annotated[str | None, about("The text added to the arguments' JSON.")] = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A chunk's addition to a call; the first of a call has its id and type."""

    index: Annotated[int, about("The number of the call, from 0.")]
    function: Annotated[FunctionDelta, about("The addition to its function.")]
    id: Annotated[str | None, about("The call's id, in its first part.")] = None
    type: Annotated[str | None, about("`function`, in its first part.")] = None


class Delta(msgspec.Struct, omit_defaults=True):
    """A chunk's addition to the answer."""

    role: Annotated[str | None, about("The role of the message's author, in the first event.")] = (
        None
    )
    content: Annotated[str | None, about("The added text.")] = None
    reasoning: Annotated[str | None, about("The added reasoning.")] = None
    reasoning_content: Annotated[str | None, about("The added reasoning, by its older name.")] = (
        None
    )
    tool_calls: Annotated[list[ToolCallDelta] | None, about("The additions to calls.")] = None
    function_call: Annotated[
        FunctionDelta | None, about("The addition to the call, if the request has `functions`.")
    ] = None


class ChatChunkChoice(msgspec.Struct):
    """One answer's part in a chunk of a stream."""

    index: Annotated[int, about("The number of the output, from 0.")]
    delta: Annotated[Delta, about("The addition to the answer.")]
    logprobs: Annotated[ChatLogprobs | None, about("Log-probabilities, if asked for.")] = None
    finish_reason: Annotated[
        str | None,
        about(
            "The reason for its end, in its last event: `stop`, `length`, `tool_calls`, "
            "`function_call`, or `abort`."
        ),
    ] = None
    stop_reason: Annotated[
        int | str | UnsetType | None,
        about("The stop string or stop token that ended it; null for the model's own end."),
    ] = UNSET
    matched_stop: Annotated[
        int | str | UnsetType | None,
        about("The same, with the model's own end, as in SGLang."),
    ] = UNSET
    token_ids: Annotated[
        list[int] | UnsetType, about("The tokens, if `return_token_ids` asks for them.")
    ] = UNSET
    cumulative_logprob: Annotated[float | UnsetType, fields.BEAM_LOGPROB] = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    object: Annotated[str, about("Always `chat.completion.chunk`.")] = "chat.completion.chunk"
    created: Annotated[int, about("Time of creation, in Unix seconds.")]
    model: Annotated[str, about("The name that the model is served under.")]
    choices: Annotated[
        list[ChatChunkChoice],
        about("One answer's part; none in the last event, which has the usage."),
    ]
    usage: Annotated[
        UsageReply | UnsetType | None,
        about("Tokens used so far, if `stream_options` asks for them."),
    ] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, about("The prompt's tokens as the model saw them, if asked for.")
    ] = UNSET
    prompt_text: Annotated[
        str | UnsetType, about("The prompt as the chat template wrote it, if asked for.")
    ] = UNSET
