"""SGLang's ``/generate``: its request and its response, as classes.

Fields marked with :func:`~trioserve.http.api.schema.reading.only` are known and refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import (
    Count,
    Exclusive,
    GrammarText,
    Identifier,
    NumOutputs,
    Priority,
    Seconds,
    TokenId,
    about,
    hint,
    one_worker,
    only,
)
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.http.api.schema.sampling_fields import SamplingFields
from trioserve.http.api.sessions.schemas import SessionParams
from trioserve.protocol.sampling import MAX_LOGPROB_TOKEN_IDS

DEFAULT_NEW_TOKENS = 128
"""Output tokens of a request that gives no limit, as in SGLang."""


def _text_only() -> msgspec.Meta:
    return only([], refusal=Refusal.READING_MEDIA)


class NativeSampling(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """SGLang's ``sampling_params``."""

    EXCLUSIVE: ClassVar = (Exclusive(("regex", "ebnf", "json_schema", "structural_tag")),)

    max_new_tokens: Annotated[
        Count | None,
        about(
            "Most tokens to produce; by default 128, or the server's default if that is "
            "smaller. 0 only computes the prompt."
        ),
    ] = None
    min_new_tokens: fields.MinTokens = None
    n: Annotated[
        NumOutputs | None,
        about(
            "Number of outputs for each prompt, which is computed once. Above 1 the answer is "
            "a list, the outputs of one prompt next to each other. All prompts of a batch "
            "have the same number."
        ),
    ] = None
    no_stop_trim: fields.IncludeStop = None
    sampling_seed: fields.Seed = None
    regex: Annotated[
        GrammarText | None, about("A regular expression that the whole output matches.")
    ] = None
    ebnf: Annotated[
        GrammarText | None, about("A grammar that the output follows: GBNF, or Lark's notation.")
    ] = None
    json_schema: Annotated[
        GrammarText | dict[str, Any] | None,
        about(
            "A JSON schema that the output follows, as an object or as its text; `$$ANY$$` for any "
            "object."
        ),
    ] = None
    structural_tag: Annotated[
        GrammarText | dict[str, Any] | None,
        about(
            "Free text with structures in it: an object, or its text, with `structures` (each has "
            "`begin`, `schema` and `end`) and `triggers`."
        ),
    ] = None
    use_beam_search: fields.UseBeamSearch = None
    custom_params: fields.ProcessorArguments = None

    stream_interval: Annotated[Any, only(1, refusal=Refusal.STREAM_INTERVALS)] = None


_PromptIds = Annotated[
    list[TokenId | Annotated[list[TokenId], msgspec.Meta(min_length=1)]],
    msgspec.Meta(
        min_length=1,
        extra_json_schema={"anyOf": [{"items": {"type": "integer"}}, {"items": {"type": "array"}}]},
    ),
]
"""Ids, or lists of ids."""
_ReturnedStates = bool | Literal["last", "all"]
_AdapterName = Annotated[str, msgspec.Meta(max_length=512)]
_AskedIds = Annotated[
    list[TokenId | Annotated[list[TokenId], msgspec.Meta(max_length=MAX_LOGPROB_TOKEN_IDS)]],
    msgspec.Meta(
        extra_json_schema={
            "anyOf": [
                {"items": {"type": "integer"}, "maxItems": MAX_LOGPROB_TOKEN_IDS},
                {"items": {"type": "array"}},
            ]
        }
    ),
]


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /generate``: one prompt, or a list of them with lists of their fields."""

    EXCLUSIVE: ClassVar = (Exclusive(("text", "input_ids"), required=True),)

    text: Annotated[
        Text | Annotated[list[Text], msgspec.Meta(min_length=1)] | None,
        about("The prompt, or a list of prompts; it or `input_ids` is required."),
    ] = None
    input_ids: Annotated[
        _PromptIds | None, about("The prompt as token ids, or a list of prompts.")
    ] = None
    image_data: Annotated[
        Text | list[Text | list[Text]] | None,
        about(
            "Images in place of the texts of the model's image token in `text`, in order: data "
            "URLs, base64, or http and https URLs of hosts that `--allowed-media-domains` names. "
            "For several prompts it is a list with one image, or a list of images, for each."
        ),
    ] = None
    audio_data: Annotated[
        Text | list[Text | list[Text]] | None,
        about("Audio clips in place of the model's audio token in `text`; see `image_data`."),
    ] = None
    video_data: Annotated[
        Text | list[Text | list[Text]] | None,
        about("Videos in place of the model's video token in `text`; see `image_data`."),
    ] = None
    sampling_params: Annotated[
        NativeSampling | list[NativeSampling] | None,
        about("Sampling and stop parameters: an object, or a list with one for each prompt."),
    ] = None
    stream: Annotated[
        bool | None,
        about("Answer with events, each with the whole output of one prompt so far."),
    ] = None
    stream_output: Annotated[
        bool | None,
        about("With `stream`: each event holds only new output, and the input is sent once."),
    ] = None
    rid: Annotated[
        Identifier | list[Identifier] | None,
        about("A name for the request, or a list with one for each prompt."),
    ] = None
    return_logprob: Annotated[
        bool | list[bool] | None,
        about("Report log-probabilities; one answer, or a list with one for each prompt."),
    ] = None
    logprob_start_len: Annotated[
        Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
        | list[Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]]
        | None,
        about(
            "The prompt's position from which log-probabilities are reported, too; the token "
            "there comes without one. -1, the default: those of the output only. It has no "
            "effect without `return_logprob`."
        ),
    ] = None
    return_normalized_logprob: Annotated[
        bool | None,
        about(
            "Report the mean log-probability of the prompt's tokens behind position "
            "`logprob_start_len`, 0 by default."
        ),
    ] = None
    top_logprobs_num: Annotated[
        Count | list[Count] | None,
        about("Most probable tokens to report at each position (`--max-logprobs` bounds it)."),
    ] = None
    token_ids_logprob: Annotated[
        _AskedIds | None,
        about("Tokens to report at each position: a list, or a list with one for each prompt."),
    ] = None
    return_text_in_logprobs: Annotated[
        bool | None, about("Put each token's text beside its log-probability.")
    ] = None
    return_prompt_token_ids: Annotated[
        bool | None, about("Put the prompt's token ids into the answer.")
    ] = None
    return_hidden_states: Annotated[
        _ReturnedStates | list[_ReturnedStates] | None,
        about(
            "Return hidden states in `output_tensors`: `last` for those that tokens were drawn "
            "from, `all` or true for those of the prompt as well; a list has one for each prompt."
        ),
    ] = None
    return_context_logits: Annotated[
        bool | None,
        about("Return the raw logits behind each token of the prompt in `output_tensors`."),
    ] = None
    return_generation_logits: Annotated[
        bool | None,
        about("Return the raw logits that each token was drawn from in `output_tensors`."),
    ] = None
    priority: Annotated[
        Priority | None,
        about("Larger runs sooner under `--scheduling-policy priority`, as in SGLang."),
    ] = None
    extra_key: Annotated[
        str | list[str] | None,
        about(
            "Share cached prefixes only with requests of the same key; a list has one for each "
            "prompt."
        ),
    ] = None
    kv_cache_retention_config: fields.KvCacheRetention = None
    session_params: Annotated[
        SessionParams | None, about("Make the request a turn of a session.")
    ] = None
    timeout: Annotated[
        Seconds | None, about("Seconds after which the request is ended with a 504.")
    ] = None

    log_metrics: Annotated[Any, hint()] = None
    no_logs: Annotated[Any, hint()] = None
    session_id: Annotated[Any, hint()] = None
    routing_key: Annotated[Any, hint()] = None
    conversation_id: Annotated[Any, hint()] = None
    custom_labels: Annotated[Any, hint()] = None
    external_trace_header: Annotated[Any, hint()] = None
    received_time: Annotated[Any, hint()] = None

    input_embeds: Annotated[Any, only(refusal=Refusal.INPUT_EMBEDDINGS)] = None
    positional_embed_overrides: Annotated[Any, only(refusal=Refusal.INPUT_EMBEDDINGS)] = None
    mm_hashes: Annotated[Any, _text_only()] = None
    use_audio_in_video: Annotated[Any, only(False, refusal=Refusal.READING_MEDIA)] = None
    modalities: Annotated[Any, only(["text"], [], refusal=Refusal.READING_MEDIA)] = None
    max_dynamic_patch: Annotated[Any, _text_only()] = None
    min_dynamic_patch: Annotated[Any, _text_only()] = None
    image_max_dynamic_patch: Annotated[Any, _text_only()] = None
    video_max_dynamic_patch: Annotated[Any, _text_only()] = None
    images_config: Annotated[Any, _text_only()] = None
    encoder_urls: Annotated[Any, _text_only()] = None
    lora_path: Annotated[
        _AdapterName | list[_AdapterName | None] | None,
        about("The name of a loaded adapter, for all prompts or for each."),
    ] = None
    lora_id: Annotated[Any, only(refusal=Refusal.ADAPTER_IDS)] = None
    custom_logit_processor: Annotated[
        Any,
        only(refusal=Refusal.CUSTOM_PROCESSOR),
    ] = None
    return_routed_experts: Annotated[Any, only(False, refusal=Refusal.ROUTED_EXPERTS)] = None
    routed_experts_start_len: Annotated[Any, only(0, refusal=Refusal.ROUTED_EXPERTS)] = None
    return_indexer_topk: Annotated[Any, only(False, refusal=Refusal.SPARSE_ATTENTION)] = None
    return_sampling_mask: Annotated[Any, only(False, refusal=Refusal.SAMPLING_MASKS)] = None
    return_bytes: Annotated[Any, only(False, refusal=Refusal.RAW_BYTES)] = None
    return_entropy: Annotated[Any, only(False, refusal=Refusal.ENTROPY)] = None
    multi_item_delimiter_indices: Annotated[Any, only([], refusal=Refusal.MULTI_ITEM_PROMPTS)] = (
        None
    )
    require_reasoning: Annotated[Any, only(False, refusal=Refusal.REQUIRED_REASONING)] = None
    background: Annotated[Any, only(False, refusal=Refusal.BACKGROUND_GENERATION)] = None
    bootstrap_host: Annotated[Any, one_worker()] = None
    bootstrap_port: Annotated[Any, one_worker()] = None
    bootstrap_room: Annotated[Any, one_worker()] = None
    bootstrap_pair_key: Annotated[Any, one_worker()] = None
    decode_tp_size: Annotated[Any, one_worker()] = None
    routed_dp_rank: Annotated[Any, only(refusal=Refusal.CHOSEN_WORKERS)] = None
    disagg_prefill_dp_rank: Annotated[Any, one_worker()] = None


class NativeFinish(msgspec.Struct):
    """Reason for an output's end: ``stop`` with its match, or ``length`` with the length."""

    type: Annotated[str, about("`stop`, `length`, or `abort`.")]
    matched: Annotated[int | str | UnsetType, about("The stop string or token that ended it.")] = (
        UNSET
    )
    length: Annotated[int | UnsetType, about("The output's length in tokens.")] = UNSET


NativeLogprob = tuple[float | None, int, str | None]
"""Log-probability, token id and, if asked for, text. The first token of a list has no
log-probability.
"""
NativeLogprobs = list[NativeLogprob] | None
"""Several tokens at one position; none at the beginning."""


class MetaInfo(msgspec.Struct, kw_only=True):
    """Metadata of a text. The latency is in seconds since the request arrived.

    The lists named ``top`` hold the most probable tokens at each position; those named
    ``token_ids`` hold the tokens that were asked for.
    """

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    finish_reason: Annotated[
        NativeFinish | None, about("The reason for its end; null while it goes on.")
    ]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.")]
    completion_tokens: Annotated[int, about("Tokens of this output.")]
    cached_tokens: Annotated[int, about("Tokens of the prompt that were in the prefix cache.")]
    e2e_latency: Annotated[float, about("Seconds since the request arrived.")]
    response_sent_to_client_ts: Annotated[
        float | UnsetType, about("Time at which the whole output was sent, in Unix seconds.")
    ] = UNSET
    cumulative_logprob: Annotated[float | UnsetType, fields.BEAM_LOGPROB] = UNSET
    input_token_logprobs: Annotated[
        list[NativeLogprob] | UnsetType, about("The prompt's tokens, from `logprob_start_len` on.")
    ] = UNSET
    output_token_logprobs: Annotated[
        list[NativeLogprob] | UnsetType, about("The output's tokens.")
    ] = UNSET
    normalized_prompt_logprob: Annotated[
        float | UnsetType | None,
        about("The mean log-probability of the prompt's tokens, if asked for."),
    ] = UNSET
    input_top_logprobs: Annotated[
        list[NativeLogprobs] | UnsetType,
        about("The most probable tokens at each position of the prompt."),
    ] = UNSET
    output_top_logprobs: Annotated[
        list[NativeLogprobs] | UnsetType,
        about("The most probable tokens at each position of the output."),
    ] = UNSET
    input_token_ids_logprobs: Annotated[
        list[NativeLogprobs] | UnsetType,
        about("Those of `token_ids_logprob` at each position of the prompt."),
    ] = UNSET
    output_token_ids_logprobs: Annotated[
        list[NativeLogprobs] | UnsetType,
        about("Those of `token_ids_logprob` at each position of the output."),
    ] = UNSET
    output_tensors: Annotated[
        str | UnsetType,
        about(
            "Hidden states and logits with the whole output, if asked for: base64 of a safetensors "
            "file. Those of the prompt are in its first output's."
        ),
    ] = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The output so far; an event of a stream holds all of it again, unless `stream_output` is set.

    ``index`` numbers the outputs of a list: the prompt's number times ``n``, plus the output's own.
    ``prompt_token_ids`` comes with the whole output only.
    """

    text: Annotated[str, about("The text so far.")]
    output_ids: Annotated[list[int], about("Its tokens.")]
    meta_info: Annotated[MetaInfo, about("Metadata of the output.")]
    index: Annotated[
        int | UnsetType, about("The number of the output, if the answer is a list.")
    ] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType,
        about("The prompt's tokens, if asked for, with the whole output."),
    ] = UNSET
