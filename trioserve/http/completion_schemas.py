"""Requests and responses of ``/v1/completions``, as classes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.openai_schemas import GenerationRequest, UsageReply
from trioserve.http.schemas import Count, TokenId, only

__all__ = ["CompletionRequest", "CompletionResponse"]


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
