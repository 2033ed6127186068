"""SGLang's ``/generate``: its request and its response, as classes.

Fields marked with :func:`~trioserve.http.schemas.only` are known and refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.schemas import Count, Identifier, Seconds, TokenId, hint, only

__all__ = ["DEFAULT_NEW_TOKENS", "GenerateRequest", "GenerateResponse", "NativeSampling"]

DEFAULT_NEW_TOKENS = 128
"""What a request gets that says nothing of it, as in SGLang."""


class NativeSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """SGLang's ``sampling_params``."""

    max_new_tokens: Count | None = DEFAULT_NEW_TOKENS
    min_new_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    n: Annotated[Any, only(1)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    stop_regex: Annotated[Any, only([])] = None
    json_schema: Annotated[Any, only()] = None
    regex: Annotated[Any, only()] = None
    ebnf: Annotated[Any, only()] = None
    structural_tag: Annotated[Any, only()] = None
    custom_params: Annotated[Any, only({})] = None
    stream_interval: Annotated[Any, only(1)] = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /generate``: one prompt, or a list of them with what goes with each."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: Identifier | list[Identifier] | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: Count | list[Count] | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    extra_key: str | None = None
    timeout: Seconds | None = None

    log_metrics: Annotated[Any, hint()] = None
    no_logs: Annotated[Any, hint()] = None
    session_id: Annotated[Any, hint()] = None
    routing_key: Annotated[Any, hint()] = None
    conversation_id: Annotated[Any, hint()] = None
    custom_labels: Annotated[Any, hint()] = None

    logprob_start_len: Annotated[Any, only(-1)] = None
    token_ids_logprob: Annotated[Any, only([])] = None
    input_embeds: Annotated[Any, only()] = None
    image_data: Annotated[Any, only([])] = None
    video_data: Annotated[Any, only([])] = None
    audio_data: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"], [])] = None
    session_params: Annotated[Any, only({})] = None
    lora_path: Annotated[Any, only()] = None
    custom_logit_processor: Annotated[Any, only()] = None
    return_hidden_states: Annotated[Any, only(False)] = None
    return_routed_experts: Annotated[Any, only(False)] = None
    return_sampling_mask: Annotated[Any, only(False)] = None
    return_prompt_token_ids: Annotated[Any, only(False)] = None
    return_bytes: Annotated[Any, only(False)] = None
    return_entropy: Annotated[Any, only(False)] = None
    require_reasoning: Annotated[Any, only(False)] = None
    background: Annotated[Any, only(False)] = None
    bootstrap_host: Annotated[Any, only()] = None
    bootstrap_port: Annotated[Any, only()] = None
    bootstrap_room: Annotated[Any, only()] = None
    routed_dp_rank: Annotated[Any, only()] = None


class NativeFinish(msgspec.Struct):
    """Why an output ended: ``stop`` with what matched, or ``length`` with the length."""

    type: str
    matched: int | str | UnsetType = UNSET
    length: int | UnsetType = UNSET


NativeLogprob = tuple[float, int, str | None]
"""Log-probability, token id and, if asked for, text."""


class MetaInfo(msgspec.Struct, kw_only=True):
    """What goes with a text. The latency is in seconds since the request arrived."""

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    input_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    output_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[NativeLogprob]] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeLogprob]] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The output so far; an event of a stream holds all of it again. ``index`` is a batch's."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
