"""What all of the OpenAI API's requests and responses share, with vLLM's additions, as classes.

The names and the meaning of the fields are theirs. Fields marked with
:func:`~trioserve.http.schemas.only` are known and refused; the others do what they say.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from trioserve.http.schemas import Count, Identifier, Seconds, TokenId, hint, only

__all__ = [
    "GenerationRequest",
    "ModelCard",
    "ModelList",
    "StreamOptions",
    "UsageReply",
]


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


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageReply(msgspec.Struct):
    """What a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
