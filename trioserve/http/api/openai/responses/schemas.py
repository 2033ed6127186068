"""Requests of ``/v1/responses``, as classes.

:mod:`~trioserve.http.api.openai.responses.items` has the input. The names and the meaning of the
fields are OpenAI's, with vLLM's and SGLang's additions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.http.api.openai.chat.messages import (
    MAX_TOOLS,
    AllowedMode,
    FunctionName,
    FunctionParameters,
)
from trioserve.http.api.openai.responses.items import InputItems
from trioserve.http.api.openai.structured_schemas import (
    JsonObjectFormat,
    StructuredOutputs,
    TextFormat,
)
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import (
    Count,
    Exclusive,
    Identifier,
    about,
    hint,
    one_worker,
    only,
)
from trioserve.http.api.schema.refused_fields import Refusal

LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probabilities."""

_Include = Annotated[
    list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None,
    about(
        f"Further data to return. `{LOGPROBS}`: the log-probabilities of the text's tokens. "
        "`reasoning.encrypted_content` adds nothing, because reasoning is returned in plain "
        "words, which can be sent back."
    ),
]


class FunctionTool(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"
):
    """A function that the model may call; there are no other tools."""

    name: Annotated[FunctionName, about("The function's name.")]
    description: Annotated[Text | None, about("A description for the model.")] = None
    parameters: FunctionParameters = None
    strict: Annotated[
        bool | None,
        about("If true, arguments have to follow the schema, enforced by a grammar."),
    ] = None
    output_schema: Annotated[Any, hint()] = None
    async_: Annotated[Any, only(False, refusal=Refusal.ASYNCHRONOUS_CALLS)] = msgspec.field(
        default=None, name="async"
    )
    defer_loading: Annotated[Any, only(False, refusal=Refusal.TOOL_SEARCH)] = None
    allowed_callers: Annotated[Any, only(["direct"], refusal=Refusal.CALLING_PROGRAMS)] = None


class ChosenFunctionTool(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"
):
    """The function that has to be called, or one of the allowed ones."""

    name: Annotated[FunctionName, about("The name of one of the tools.")]


class AllowedFunctions(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """A choice among some of the tools."""

    mode: AllowedMode
    tools: Annotated[
        Annotated[list[ChosenFunctionTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)],
        about("The tools that may be called; the prompt shows the others, too."),
    ]


class NamedSchemaFormat(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"
):
    """JSON that follows a schema."""

    name: Annotated[str, about("A name for the schema; it isn't shown to the model.")]
    schema: Annotated[dict[str, Any], about("The JSON schema.")]
    description: Annotated[
        Text | None, about("A description of the schema; it isn't shown to the model.")
    ] = None
    strict: Annotated[bool | None, about("The schema is always followed strictly.")] = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Form of an answer's text."""

    format: Annotated[
        TextFormat | JsonObjectFormat | NamedSchemaFormat | None,
        about("Any text by default."),
    ] = None
    verbosity: Annotated[Any, only("medium", refusal=Refusal.TEMPLATE_ARGUMENT)] = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Reasoning settings."""

    effort: fields.ReasoningEffort = None
    summary: Annotated[Any, only("auto", refusal=Refusal.SUMMARIES)] = None
    generate_summary: Annotated[Any, only("auto", refusal=Refusal.SUMMARIES)] = None
    context: Annotated[Any, only("auto", refusal=Refusal.SHOWN_REASONING)] = None
    mode: Annotated[Any, only("standard", refusal=Refusal.REASONING_MODES)] = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream."""

    include_obfuscation: Annotated[Any, only(False, refusal=Refusal.PADDED_EVENTS)] = None


_ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenFunctionTool | AllowedFunctions | None,
    about(
        "`none`: tools are left out of the prompt. `auto`: the model decides. `required`, or "
        "a function: a grammar makes it call one, or this one. `auto` by default if there are "
        "tools."
    ),
]
_Truncation = Annotated[Any, only("disabled", refusal=Refusal.CONVERSATION_TRUNCATION)]
_Conversation = Annotated[Any, only(refusal=Refusal.CONVERSATIONS)]
_MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
_MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/responses``."""

    EXCLUSIVE: ClassVar = (Exclusive(("cache_salt", "extra_key")),)
    USUAL_TYPES: ClassVar = {"input": "message"}

    input: Annotated[
        Text | InputItems, about("The new input: the user's text, or messages and other items.")
    ]
    instructions: Annotated[
        Text | None,
        about("A system message before everything else. Later responses don't inherit it."),
    ] = None
    previous_response_id: Annotated[
        Identifier | None,
        about("The response to continue: its input and output come before this input."),
    ] = None
    store: Annotated[
        bool | None, about("If false, the response isn't kept, and can't be named later.")
    ] = None
    metadata: Annotated[
        Annotated[dict[_MetadataKey, _MetadataValue], msgspec.Meta(max_length=16)] | None,
        about("Kept with the response, and returned with it."),
    ] = None
    model: fields.Model = None
    stream: Annotated[bool | None, about("Send the response as events, as it is generated.")] = None
    stream_options: Annotated[ResponseStreamOptions | None, about("Options of the stream.")] = None
    include: _Include = None

    max_output_tokens: Annotated[
        Count | None,
        about(
            "Most tokens, reasoning included; by default as many as fit into the model's context."
        ),
    ] = None
    top_logprobs: Annotated[
        Count | None,
        about("Number of most probable tokens with log-probabilities, if `include` asks for some."),
    ] = None
    temperature: fields.Temperature = None
    top_p: fields.TopP = None
    top_k: fields.TopK = None
    min_p: fields.MinP = None
    repetition_penalty: fields.RepetitionPenalty = None
    frequency_penalty: fields.FrequencyPenalty = None
    presence_penalty: fields.PresencePenalty = None
    logit_bias: fields.LogitBias = None
    seed: fields.Seed = None
    stop: fields.Stop = None
    ignore_eos: fields.IgnoreEos = None
    skip_special_tokens: fields.SkipSpecialTokens = None
    include_stop_str_in_output: fields.IncludeStop = None
    vllm_xargs: fields.ProcessorArguments = None

    text: Annotated[TextOptions | None, about("The form of the text.")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("The form of the text: vLLM's field.")
    ] = None
    tools: Annotated[
        Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        about("Functions that the model may call."),
    ] = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: fields.ParallelToolCalls = None
    reasoning: Annotated[ReasoningOptions | None, about("Reasoning settings.")] = None
    chat_template_kwargs: fields.ChatTemplateArguments = None
    mm_processor_kwargs: fields.MediaProcessorArguments = None
    media_io_kwargs: fields.MediaReadingArguments = None

    priority: fields.Priority = None
    request_id: Annotated[
        Identifier | None,
        about("An id from which the response's own is made; a random one by default."),
    ] = None
    cache_salt: fields.CacheSalt = None
    extra_key: fields.ExtraKey = None
    timeout: fields.Timeout = None

    user: Annotated[Any, hint()] = None
    safety_identifier: Annotated[Any, hint()] = None
    prompt_cache_key: Annotated[Any, hint()] = None
    prompt_cache_options: Annotated[Any, hint()] = None
    prompt_cache_retention: Annotated[Any, hint()] = None
    session_id: Annotated[Any, hint()] = None
    max_tool_calls: Annotated[Any, hint()] = None

    background: Annotated[Any, only(False, refusal=Refusal.BACKGROUND_RESPONSES)] = None
    truncation: _Truncation = None
    service_tier: Annotated[Any, only("auto", "default", refusal=Refusal.TIERS)] = None
    conversation: _Conversation = None
    prompt: Annotated[Any, only(refusal=Refusal.KEPT_PROMPTS)] = None
    context_management: Annotated[Any, only([], refusal=Refusal.COMPACTION)] = None
    moderation: Annotated[Any, only(refusal=Refusal.MODERATION)] = None
    access_programs: Annotated[Any, only({}, refusal=Refusal.OTHERS_THAN_FUNCTIONS)] = None
    image: Annotated[Any, only({}, refusal=Refusal.MEDIA)] = None
    enable_response_messages: Annotated[Any, only(False, refusal=Refusal.INCLUDED_INPUT)] = None
    previous_input_messages: Annotated[Any, only([], refusal=Refusal.PREVIOUS_MESSAGES)] = None
    ngram_corpus_id: Annotated[Any, only(refusal=Refusal.DRAFT_CORPORA)] = None
    kv_transfer_params: Annotated[Any, one_worker()] = None
    ec_transfer_params: Annotated[Any, one_worker()] = None


class InputTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/responses/input_tokens``: the fields that determine a response's
    prompt.
    """

    USUAL_TYPES: ClassVar = {"input": "message"}

    input: Annotated[
        Text | InputItems, about("The new input: the user's text, or messages and other items.")
    ]
    model: fields.Model = None
    instructions: Annotated[Text | None, about("A system message before everything else.")] = None
    previous_response_id: Annotated[
        Identifier | None, about("The response to continue; its input and output count, too.")
    ] = None
    text: Annotated[TextOptions | None, about("The form of the text.")] = None
    tools: Annotated[
        Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        about("Functions that the model may call."),
    ] = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: fields.ParallelToolCalls = None
    reasoning: Annotated[ReasoningOptions | None, about("Reasoning settings.")] = None
    truncation: _Truncation = None
    conversation: _Conversation = None
    personality: Annotated[Any, only(refusal=Refusal.PERSONALITIES)] = None


class ResponseQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of ``GET /v1/responses/{response_id}``."""

    include: _Include = None
    stream: Annotated[bool | None, only(False, refusal=Refusal.KEPT_STREAMS)] = None
    starting_after: Annotated[int | None, only(refusal=Refusal.KEPT_STREAMS)] = None
    include_obfuscation: Annotated[bool | None, only(False, refusal=Refusal.PADDED_EVENTS)] = None


class InputItemsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of ``GET /v1/responses/{response_id}/input_items``."""

    after: Annotated[
        str | None,
        about(
            "The id of an item: the list begins after it. By default the list begins at its start."
        ),
    ] = None
    limit: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=100)] | None,
        about("Most items; 20 by default."),
    ] = None
    order: Annotated[
        Literal["asc", "desc"] | None,
        about("`asc`: the first one first. `desc` by default."),
    ] = None
    include: _Include = None
