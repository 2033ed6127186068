"""Requests and answers of ``/v1/messages``, as classes.

The names and the meaning of the fields are Anthropic's. Fields marked with
:func:`~trioserve.http.api.schema.reading.only` are known and refused; the others are served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.http.api.anthropic.inputs import InputMessage, TextInput, ToolName
from trioserve.http.api.openai.chat.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Count, about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.protocol.sampling import MAX_STOP_STRINGS, MAX_STRING_CHARACTERS

_StopSequences = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=MAX_STRING_CHARACTERS)]],
    msgspec.Meta(max_length=MAX_STOP_STRINGS),
]


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may call, and the client runs."""

    name: Annotated[ToolName, about("The tool's name.")]
    description: Annotated[Text | None, about("A description for the model.")] = None
    input_schema: Annotated[dict[str, Any], about("The JSON schema of its input.")]
    type: Annotated[
        Literal["custom"] | None, about("There is no other kind: the server runs no tools.")
    ] = None
    strict: Annotated[
        bool | None, about("Input has to follow the schema, enforced by a grammar.")
    ] = None
    cache_control: Annotated[Any, hint()] = None
    eager_input_streaming: Annotated[Any, hint()] = None
    allowed_callers: Annotated[Any, only([], ["direct"], refusal=Refusal.CALLERS_BUT_THE_MODEL)] = (
        None
    )
    defer_loading: Annotated[Any, only(False, refusal=Refusal.TOOL_SEARCH)] = None
    input_examples: Annotated[Any, only([], refusal=Refusal.TOOL_EXAMPLES)] = None


class AutoToolChoice(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="auto"
):
    """The model decides whether to call a tool."""

    disable_parallel_tool_use: Annotated[
        bool | None, about("If true, an answer has at most one call, enforced by a grammar.")
    ] = None


class AnyToolChoice(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="any"
):
    """The model has to call a tool; a grammar enforces it."""

    disable_parallel_tool_use: Annotated[
        bool | None, about("If true, an answer has one call, enforced by a grammar.")
    ] = None


class NamedToolChoice(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="tool"
):
    """The model has to call this tool."""

    name: Annotated[ToolName, about("The name of one of the tools.")]
    disable_parallel_tool_use: Annotated[Any, hint()] = None


class NoToolChoice(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="none"
):
    """Tools are left out of the prompt."""


_ToolChoice = AutoToolChoice | AnyToolChoice | NamedToolChoice | NoToolChoice
_Display = Annotated[
    Literal["summarized", "omitted"] | None,
    about("`omitted` leaves reasoning out of the answer; nothing is summarized."),
]


class ThinkingEnabled(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="enabled"
):
    """The model is to reason before it answers; refused if it never does."""

    budget_tokens: Annotated[Any, hint()] = None
    display: _Display = None


class ThinkingAdaptive(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="adaptive"
):
    """The model is to reason before it answers if it can."""

    display: _Display = None


class ThinkingDisabled(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="disabled"
):
    """The model isn't to reason. If its template has no switch, reasoning is left out."""


class OutputFormat(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"
):
    """JSON that follows a schema."""

    schema: Annotated[dict[str, Any], about("The JSON schema.")]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Form of the output."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        about("For the chat template; refused if the template ignores `reasoning_effort`."),
    ] = None
    format: Annotated[OutputFormat | None, about("The form of the answer.")] = None
    task_budget: Annotated[Any, only(refusal=Refusal.TEMPLATE_ARGUMENT)] = None


class MessagesPrompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A conversation, to be answered or counted."""

    model: fields.Model = None
    messages: Annotated[
        Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)],
        about(
            "The conversation so far. If the last message is the assistant's, the answer "
            "continues it."
        ),
    ]
    system: Annotated[
        Text | Annotated[list[TextInput], msgspec.Meta(max_length=MAX_PARTS)] | None,
        about("The system message, as a whole or in blocks."),
    ] = None
    tools: Annotated[
        Annotated[list[ToolDefinition], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        about("Tools that the model may call."),
    ] = None
    tool_choice: Annotated[
        _ToolChoice | None, about("Whether tools have to be called; `auto` by default.")
    ] = None
    thinking: Annotated[
        ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None,
        about("Whether the model is to reason; the template decides by default."),
    ] = None
    output_config: Annotated[OutputConfig | None, about("The form of the output.")] = None
    output_format: Annotated[
        OutputFormat | None, about("`output_config.format` of older versions.")
    ] = None
    cache_control: Annotated[Any, hint()] = None
    context_management: Annotated[Any, only(refusal=Refusal.CONTEXT_EDITING)] = None
    mcp_servers: Annotated[Any, only([], refusal=Refusal.SERVER_TOOLS)] = None
    speed: Annotated[Any, only("standard", refusal=Refusal.SPEEDS)] = None


class MessagesRequest(MessagesPrompt, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/messages``."""

    max_tokens: Annotated[Count, about("Most tokens of the answer, reasoning included.")]
    stop_sequences: Annotated[
        _StopSequences | None,
        about(
            "Strings that end the output where they first occur in its text; an empty one has "
            "no effect."
        ),
    ] = None
    stream: Annotated[bool | None, about("Send the answer as events, as it is generated.")] = None
    temperature: fields.Temperature = None
    top_k: fields.TopK = None
    top_p: fields.TopP = None
    metadata: Annotated[Any, hint()] = None
    service_tier: Annotated[Any, only("auto", "standard_only", refusal=Refusal.TIERS)] = None
    container: Annotated[Any, only(refusal=Refusal.CLIENT_CODE)] = None
    diagnostics: Annotated[Any, only(refusal=Refusal.CACHE_DIAGNOSTICS)] = None
    inference_geo: Annotated[Any, only(refusal=Refusal.REGIONS)] = None


class CountTokensRequest(MessagesPrompt, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/messages/count_tokens``."""


class TokenCount(msgspec.Struct):
    """The length of a conversation."""

    input_tokens: Annotated[int, about("Tokens of the conversation's prompt.")]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: Annotated[str, about("The text.")]
    citations: Annotated[None, about("Always null.")] = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning before an answer, without the marks."""

    thinking: Annotated[str, about("The reasoning.")]
    signature: Annotated[str, about("Always empty: reasoning isn't signed.")] = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model asks for."""

    id: Annotated[str, about("The name that the tool's result refers to.")]
    name: Annotated[str, about("The tool's name.")]
    input: Annotated[
        dict[str, Any], about("The tool's input; empty if the model wrote no complete JSON object.")
    ]


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens that were used; those of the prompt are counted in two parts."""

    input_tokens: Annotated[int, about("Tokens of the prompt that were computed.")]
    cache_creation_input_tokens: Annotated[
        int, about("Always 0: every prompt is cached, and none is counted twice.")
    ] = 0
    cache_read_input_tokens: Annotated[
        int, about("Tokens of the prompt that were in the prefix cache.")
    ]
    output_tokens: Annotated[int, about("Tokens that were produced.")]


class MessageReply(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer; without its content and its end, the beginning of a stream."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    role: Annotated[str, about("Always `assistant`.")] = "assistant"
    model: Annotated[str, about("The name that the model is served under.")]
    content: Annotated[
        list[TextBlock | ThinkingBlock | ToolUseBlock], about("The model's output, in blocks.")
    ]
    stop_reason: Annotated[
        str | None, about("`end_turn`, `max_tokens`, `stop_sequence`, or `tool_use`.")
    ] = None
    stop_sequence: Annotated[str | None, about("The stop sequence that ended it, if one did.")] = (
        None
    )
    usage: Annotated[MessageUsage, about("Tokens that were used.")]


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: Annotated[MessageReply, about("The answer, still empty.")]


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: Annotated[int, about("The block's number, from 0.")]
    content_block: Annotated[
        TextBlock | ThinkingBlock | ToolUseBlock, about("The block, still empty.")
    ]


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: Annotated[str, about("The added text.")]


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of the reasoning."""

    thinking: Annotated[str, about("The added text.")]


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input."""

    partial_json: Annotated[str, about("The added JSON, as the model wrote it.")]


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: Annotated[int, about("The block's number, from 0.")]
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, about("The added piece.")]


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: Annotated[int, about("The block's number, from 0.")]


class MessageChange(msgspec.Struct, kw_only=True):
    """The end of the answer."""

    stop_reason: Annotated[
        str | None, about("`end_turn`, `max_tokens`, `stop_sequence`, or `tool_use`.")
    ]
    stop_sequence: Annotated[str | None, about("The stop sequence that ended it, if one did.")]


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """All blocks are complete."""

    delta: Annotated[MessageChange, about("The end of the answer.")]
    usage: Annotated[MessageUsage, about("Tokens that were used.")]


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Keep-alive of a stream without news."""


StreamEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
)
