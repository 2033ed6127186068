"""Requests and responses of ``/v1/completions``, as classes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.openai.schemas import GenerationRequest, PromptLogprobReply, UsageReply
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Count, NumOutputs, TokenId, about, only
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.http.api.sessions.schemas import SessionParams

_Prompts = Annotated[
    list[Text | TokenId | Annotated[list[TokenId], msgspec.Meta(min_length=1)]],
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
        Text | _Prompts | None,
        about("A text or a list of token ids to continue, or a list of such prompts."),
    ] = None
    prompt_embeds: Annotated[
        Text | Annotated[list[Text], msgspec.Meta(min_length=1)] | None,
        about(
            "Embeddings to continue in place of a prompt, `[tokens, hidden size]`: base64 of a "
            "safetensors file with one tensor, or of NumPy's format. A list has several such "
            "prompts. They come before those of `prompt`."
        ),
    ] = None
    max_tokens: Annotated[
        Count | None,
        about(
            "Most tokens to produce; by default 16, or the server's default if that is "
            "smaller. 0 only computes the prompt."
        ),
    ] = None
    session_params: Annotated[
        SessionParams | None, about("Make the request a turn of a session.")
    ] = None
    best_of: Annotated[
        NumOutputs | None,
        about(
            "Make this many outputs and return the `n` with the highest mean log-probability. "
            "Streamed, it must be `n`. With `use_beam_search` it is the number of beams."
        ),
    ] = None
    logprobs: Annotated[
        Count | None,
        about("Return the tokens' log-probabilities, and those of this many most probable ones."),
    ] = None
    echo: Annotated[
        bool | None,
        about("Return the prompt before the output, with its log-probabilities if asked for."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about("Let the tokenizer add its special tokens to texts; true by default."),
    ] = None

    suffix: Annotated[Any, only("", refusal=Refusal.SUFFIXES)] = None


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a completion, column by column; null for a prompt's first token."""

    text_offset: Annotated[list[int], about("Where each token's text begins.")]
    token_logprobs: Annotated[list[float | None], about("The log-probability of each.")]
    tokens: Annotated[list[str], about("The text of each.")]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        about("For each, the most probable tokens in its place, with their log-probabilities."),
    ]


class CompletionChoice(msgspec.Struct):
    """One completion, or an event's addition to it."""

    index: Annotated[int, about("The number of the output, from 0.")]
    text: Annotated[str, about("The text, or the added text.")]
    logprobs: Annotated[CompletionLogprobs | None, about("Log-probabilities, if asked for.")]
    finish_reason: Annotated[str | None, about("`stop`, `length`, or `abort`.")]
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
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprobReply] | None] | UnsetType | None,
        about("For each token of the prompt, log-probabilities by token id; null for the first."),
    ] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType | None,
        about("The prompt's tokens as the model saw them, if asked for."),
    ] = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a completion, or one event of its stream."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    object: Annotated[str, about("Always `text_completion`.")] = "text_completion"
    created: Annotated[int, about("Time of creation, in Unix seconds.")]
    model: Annotated[str, about("The name that the model is served under.")]
    choices: Annotated[
        list[CompletionChoice],
        about("The outputs: `n` for each prompt, one prompt after the other."),
    ]
    usage: Annotated[UsageReply | UnsetType | None, about("Tokens that were used.")] = UNSET
