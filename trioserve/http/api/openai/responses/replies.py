"""Responses and what they hold, as classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.http.api.openai.chat.schemas import ChatLogprob
from trioserve.http.api.openai.responses.items import InputItem, ReasoningText
from trioserve.http.api.openai.responses.schemas import (
    AllowedFunctions,
    ChosenFunctionTool,
    TextOptions,
)
from trioserve.http.api.schema.reading import about

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_ItemId = Annotated[str, about("The item's id.")]
_Status = Annotated[
    ItemStatus, about("`in_progress`, `completed`, or `incomplete` if the answer was cut off.")
]


class OutputTextReply(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: Annotated[str, about("The text.")]
    annotations: Annotated[list[Any], about("Always empty.")] = []
    logprobs: Annotated[
        list[ChatLogprob],
        about("One entry for each token of the text, if `include` asks for them."),
    ] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model's."""

    id: _ItemId
    status: _Status
    role: Annotated[str, about("Always `assistant`.")] = "assistant"
    content: Annotated[list[OutputTextReply], about("The text, in one part.")]


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning before an answer."""

    id: _ItemId
    status: _Status
    summary: Annotated[list[Any], about("Always empty.")] = []
    content: Annotated[list[ReasoningText], about("The reasoning, in one part.")]
    encrypted_content: Annotated[None, about("Always null.")] = None


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model wants called."""

    id: _ItemId
    status: _Status
    call_id: Annotated[str, about("The name that the call's output refers to.")]
    name: Annotated[str, about("The function's name.")]
    arguments: Annotated[str, about("JSON as the model wrote it.")]


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseFault(msgspec.Struct, kw_only=True):
    """Error of a failed response."""

    code: Annotated[str, about("`server_error`, `rate_limit_exceeded` or `invalid_prompt`.")]
    message: Annotated[str, about("The error, in words for a person.")]


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Reason why a response is incomplete."""

    reason: Annotated[str, about("Always `max_output_tokens`.")] = "max_output_tokens"


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Parts of the input's tokens."""

    cached_tokens: Annotated[int, about("Tokens of the input that were in the prefix cache.")]
    cache_write_tokens: Annotated[int, about("Always 0: keeping them costs nothing.")] = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Parts of the output's tokens."""

    reasoning_tokens: Annotated[int, about("Tokens of reasoning, the closing mark among them.")]


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens that a response used."""

    input_tokens: Annotated[int, about("Tokens of the whole conversation up to the answer.")]
    input_tokens_details: Annotated[InputTokensDetails, about("Parts of the input's tokens.")]
    output_tokens: Annotated[int, about("Tokens that were produced.")]
    output_tokens_details: Annotated[OutputTokensDetails, about("Parts of the output's tokens.")]
    total_tokens: Annotated[int, about("Both together.")]


class ReasoningSettings(msgspec.Struct, kw_only=True):
    """Reasoning settings of a response."""

    effort: Annotated[str | None, about("As the request gave it.")] = None
    summary: Annotated[None, about("Always null.")] = None


class FunctionToolReply(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function that the model might call."""

    name: Annotated[str, about("Its name.")]
    description: Annotated[str | None, about("A description for the model.")] = None
    parameters: Annotated[dict[str, Any] | None, about("The JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, about("Whether arguments have to follow it.")] = None


class ResponseReply(msgspec.Struct, kw_only=True):
    """A response, whole or so far."""

    id: Annotated[str, about("Its id, for `previous_response_id`.")]
    object: Annotated[str, about("Always `response`.")] = "response"
    created_at: Annotated[int, about("Time of its beginning, in Unix seconds.")]
    completed_at: Annotated[
        int | None, about("Time of its completion, in Unix seconds; null before.")
    ] = None
    status: Annotated[
        str,
        about(
            "`in_progress`, `completed`, `incomplete`, `failed`, or `cancelled` if an "
            "administrator has ended it."
        ),
    ] = "in_progress"
    model: Annotated[str, about("The name that the model is served under.")]
    output: Annotated[
        list[OutputItem], about("Reasoning, messages and calls, in the order in which they came.")
    ] = []
    error: Annotated[ResponseFault | None, about("The error, if it failed.")] = None
    incomplete_details: Annotated[
        IncompleteDetails | None, about("The reason, if it is incomplete.")
    ] = None
    usage: Annotated[ResponseUsage | None, about("Tokens that were used, once it has ended.")] = (
        None
    )
    previous_response_id: Annotated[str | None, about("The response that it continues.")] = None
    instructions: Annotated[str | None, about("As the request gave them.")] = None
    store: Annotated[bool, about("Whether it is kept.")] = True
    metadata: Annotated[dict[str, str], about("As the request gave them.")] = {}
    tools: Annotated[list[FunctionToolReply], about("As the request gave them.")] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenFunctionTool | AllowedFunctions,
        about("As the request gave it."),
    ] = "auto"
    parallel_tool_calls: Annotated[bool, about("Whether there may be several calls.")] = True
    text: Annotated[TextOptions, about("As the request gave it.")]
    reasoning: Annotated[ReasoningSettings, about("Reasoning settings.")]
    max_output_tokens: Annotated[int | None, about("As the request gave it.")] = None
    max_tool_calls: Annotated[None, about("Always null.")] = None
    temperature: Annotated[float, about("The temperature.")]
    top_p: Annotated[float, about("The probability mass that was drawn from.")]
    top_logprobs: Annotated[int, about("As the request gave it.")] = 0
    truncation: Annotated[str, about("Always `disabled`.")] = "disabled"
    background: Annotated[bool, about("Always false.")] = False
    service_tier: Annotated[str, about("Always `default`.")] = "default"


class InputItemList(msgspec.Struct, kw_only=True):
    """Items of a response's own input."""

    object: Annotated[str, about("Always `list`.")] = "list"
    data: Annotated[list[InputItem], about("The items.")]
    first_id: Annotated[str | None, about("The first one's id; null if there is none.")]
    last_id: Annotated[str | None, about("The last one's id; null if there is none.")]
    has_more: Annotated[bool, about("Whether there are others behind the last one.")]


class InputTokensReply(msgspec.Struct, kw_only=True):
    """Number of tokens of a prompt."""

    object: Annotated[str, about("Always `response.input_tokens`.")] = "response.input_tokens"
    input_tokens: Annotated[int, about("Tokens of the prompt.")]


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A response that is no longer kept."""

    id: Annotated[str, about("Its id.")]
    object: Annotated[str, about("Always `response`.")] = "response"
    deleted: Annotated[bool, about("Always true.")] = True
