"""Requests and responses of ``/v1/completions``, as classes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.openai_schemas import (
    GenerationRequest,
    NumOutputs,
    PromptLogprobReply,
    UsageReply,
)
from trioserve.http.schemas import Count, TokenId, about, only

__all__ = ["CompletionChoice", "CompletionLogprobs", "CompletionRequest", "CompletionResponse"]

_Prompts = Annotated[
    list[str | TokenId | Annotated[list[TokenId], msgspec.Meta(min_length=1)]],
    msgspec.Meta(
        min_length=1,
        extra_json_schema={
            "anyOf": [
                {"items": {"type": "integer"}},
                {"items": {"type": ["string", "array"]}},
            ]
        },
    ),
]


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | _Prompts,
        about("A text or a list of token ids to continue, or a list of such prompts."),
    ]
    max_tokens: Annotated[
        Count | None,
        about("Most tokens to produce; 16 if it isn't given. 0 only computes the prompt."),
    ] = None
    best_of: Annotated[
        NumOutputs | None,
        about(
            "Make as many outputs and give the `n` whose tokens are the most probable on average. "
            "Streamed, it must be `n`."
        ),
    ] = None
    logprobs: Annotated[
        Count | None,
        about("Tell the tokens' log-probabilities, and those of as many most probable ones."),
    ] = None
    echo: Annotated[
        bool | None,
        about("Give the prompt before the output, with its log-probabilities where asked for."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about("Let the tokenizer add its special tokens to texts; true if it isn't given."),
    ] = None

    suffix: Annotated[
        Any, only("", why="models here go on from a prompt; they don't fill in before a suffix")
    ] = None
    prompt_embeds: Annotated[Any, only(why="prompts are texts or token ids")] = None


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a completion, column by column; null for a prompt's first token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One completion, or what an event of a stream adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprobReply] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a completion, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | UnsetType | None = UNSET
