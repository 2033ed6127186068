"""Classes that all of the OpenAI API's requests and responses share, with the peers' additions.

The names and the meaning of the fields are OpenAI's, vLLM's and SGLang's. Fields marked with
:func:`~trioserve.http.api.schema.reading.only` are known and refused; the others are served.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.openai.structured_schemas import JsonText, ResponseFormat, StructuredOutputs
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import (
    Count,
    Exclusive,
    GrammarText,
    Identifier,
    NumOutputs,
    TokenId,
    about,
    hint,
    one_worker,
    only,
)
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.http.api.schema.sampling_fields import SamplingFields
from trioserve.protocol.sampling import (
    MAX_BAD_WORDS,
    MAX_EXTRA_ARGS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STRING_CHARACTERS,
)

_BadWord = Annotated[str, msgspec.Meta(max_length=MAX_STRING_CHARACTERS)]
_ExtraArgs = Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_EXTRA_ARGS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream."""

    include_usage: Annotated[
        bool | None, about("End with an event that holds the usage and no choice.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, about("With `include_usage`, send the usage so far in every event.")
    ] = None
    include_obfuscation: Annotated[Any, only(False, refusal=Refusal.PADDED_EVENTS)] = None


class GenerationRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields that chats and completions share."""

    EXCLUSIVE: ClassVar = (
        Exclusive(
            (
                *("structured_outputs", "guided_json", "guided_json_object", "guided_regex"),
                *("guided_choice", "guided_grammar", "json_schema", "regex", "ebnf"),
            )
        ),
        Exclusive(("vllm_xargs", "custom_params")),
        Exclusive(("include_stop_str_in_output", "no_stop_trim")),
        Exclusive(("request_id", "rid")),
        Exclusive(("cache_salt", "extra_key")),
    )

    model: fields.Model = None
    n: Annotated[
        NumOutputs | None, about("Number of outputs for each prompt, which is computed once.")
    ] = None
    stream: Annotated[bool | None, about("Send the output as events, as it is generated.")] = None
    stream_options: Annotated[StreamOptions | None, about("Options of the stream.")] = None

    allowed_token_ids: Annotated[
        Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None,
        about("The only tokens that may be drawn."),
    ] = None
    bad_words: Annotated[
        Annotated[list[_BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None,
        about(
            "Words to keep out of the output: the last token of each is never drawn; an empty "
            "one has no effect."
        ),
    ] = None
    seed: fields.Seed = None
    vllm_xargs: fields.ProcessorArguments = None
    custom_params: Annotated[_ExtraArgs | None, about("SGLang's name of `vllm_xargs`.")] = None

    min_tokens: fields.MinTokens = None
    include_stop_str_in_output: fields.IncludeStop = None
    no_stop_trim: Annotated[
        bool | None, about("SGLang's name of `include_stop_str_in_output`.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[
            int,
            msgspec.Meta(ge=-1, le=2**31 - 1, extra_json_schema={"not": {"const": 0}}),
        ]
        | None,
        about(
            "Keep this many tokens of a longer prompt; -1: as many as fit into the model's context."
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        about("Side from which a prompt that is too long is truncated; left by default."),
    ] = None

    response_format: Annotated[
        ResponseFormat | None, about("The form of the output: OpenAI's field.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("The form of the output: vLLM's field.")
    ] = None
    guided_json: Annotated[
        JsonText | None, about("`structured_outputs.json` of older versions of vLLM.")
    ] = None
    guided_json_object: Annotated[
        bool | None, about("`structured_outputs.json_object` of older versions of vLLM.")
    ] = None
    guided_regex: Annotated[
        GrammarText | None, about("`structured_outputs.regex` of older versions of vLLM.")
    ] = None
    guided_choice: Annotated[
        Annotated[list[Text], msgspec.Meta(min_length=1)] | None,
        about("`structured_outputs.choice` of older versions of vLLM."),
    ] = None
    guided_grammar: Annotated[
        GrammarText | None, about("`structured_outputs.grammar` of older versions of vLLM.")
    ] = None
    guided_whitespace_pattern: Annotated[
        GrammarText | None,
        about("`structured_outputs.whitespace_pattern` of older versions of vLLM."),
    ] = None
    guided_decoding_backend: Annotated[
        Any, only("auto", "guidance", refusal=Refusal.GUIDED_DECODING_BACKENDS)
    ] = None
    json_schema: Annotated[
        JsonText | None, about("A JSON schema that the output follows: SGLang's field.")
    ] = None
    regex: Annotated[
        GrammarText | None,
        about("A regular expression that the whole output matches: SGLang's field."),
    ] = None
    ebnf: Annotated[
        GrammarText | None,
        about("A grammar that the output follows, GBNF or Lark's notation: SGLang's field."),
    ] = None

    use_beam_search: fields.UseBeamSearch = None
    prompt_logprobs: Annotated[
        Count | None,
        about(
            "Return the log-probabilities of the prompt's tokens, and of this many most "
            "probable ones. Not with `stream`."
        ),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[TokenId], msgspec.Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None,
        about(
            "Tokens with log-probabilities in every place that has some. With the output's "
            "token they replace its most probable ones; it needs `logprobs`."
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about('Name tokens in log-probabilities as "token_id:123".')
    ] = None
    return_token_ids: Annotated[
        bool | None, about("Return the ids of the prompt's and of the output's tokens.")
    ] = None

    priority: fields.Priority = None
    request_id: Annotated[
        Identifier | None, about("An id from which the response's own is made.")
    ] = None
    rid: Annotated[Identifier | None, about("SGLang's name of `request_id`.")] = None
    cache_salt: fields.CacheSalt = None
    extra_key: fields.ExtraKey = None
    kv_cache_retention_config: fields.KvCacheRetention = None
    timeout: fields.Timeout = None

    user: Annotated[Any, hint()] = None
    metadata: Annotated[Any, hint()] = None
    safety_identifier: Annotated[Any, hint()] = None
    prompt_cache_key: Annotated[Any, hint()] = None
    prompt_cache_retention: Annotated[Any, hint()] = None
    session_id: Annotated[Any, hint()] = None
    custom_labels: Annotated[Any, hint()] = None

    service_tier: Annotated[Any, only("auto", "default", refusal=Refusal.TIERS)] = None
    logits_processors: Annotated[
        Any,
        only(
            [],
            refusal=Refusal.CLIENT_PROCESSORS,
        ),
    ] = None
    custom_logit_processor: Annotated[
        Any,
        only(refusal=Refusal.CLIENT_PROCESSORS),
    ] = None
    thinking_token_budget: Annotated[Any, only(refusal=Refusal.REASONING_BUDGETS)] = None
    repetition_detection: Annotated[Any, only(refusal=Refusal.REPETITION_DETECTION)] = None
    stream_interval: Annotated[Any, only(1, refusal=Refusal.STREAM_INTERVALS)] = None
    return_token_offsets: Annotated[Any, only(False, refusal=Refusal.TOKEN_OFFSETS)] = None
    return_hidden_states: Annotated[Any, only(False, refusal=Refusal.CHAT_HIDDEN_STATES)] = None
    return_cached_tokens_details: Annotated[
        Any, only(False, refusal=Refusal.CACHED_TOKEN_DETAILS)
    ] = None
    return_routed_experts: Annotated[Any, only(False, refusal=Refusal.ROUTED_EXPERTS)] = None
    routed_experts_start_len: Annotated[Any, only(0, refusal=Refusal.ROUTED_EXPERTS)] = None
    routed_experts_prompt_start: Annotated[Any, only(0, refusal=Refusal.ROUTED_EXPERTS)] = None
    lora_path: Annotated[
        Annotated[str, msgspec.Meta(max_length=512)] | None,
        about("The name of a loaded adapter; `model` may name it, too."),
    ] = None
    images_config: Annotated[Any, only({}, refusal=Refusal.READING_MEDIA)] = None
    kv_transfer_params: Annotated[Any, one_worker()] = None
    ec_transfer_params: Annotated[Any, one_worker()] = None
    bootstrap_host: Annotated[Any, one_worker()] = None
    bootstrap_port: Annotated[Any, one_worker()] = None
    bootstrap_room: Annotated[Any, one_worker()] = None
    disagg_prefill_dp_rank: Annotated[Any, one_worker()] = None
    routed_dp_rank: Annotated[Any, only(refusal=Refusal.CHOSEN_WORKERS)] = None
    data_parallel_rank: Annotated[Any, only(refusal=Refusal.CHOSEN_WORKERS)] = None


class PromptLogprobReply(msgspec.Struct):
    """A token of a prompt, or one that was possible in its place; rank 1 is the most probable."""

    logprob: Annotated[float, about("The natural logarithm of its probability.")]
    rank: Annotated[int | None, about("1 for the most probable token.")]
    decoded_token: Annotated[str, about("Its text.")]


class PromptTokensDetails(msgspec.Struct):
    """Parts of the prompt's tokens."""

    cached_tokens: Annotated[int, about("Tokens of the prompt that were in the prefix cache.")]
    image_tokens: Annotated[
        int | UnsetType, about("Tokens of the prompt that stand for images, if it has any.")
    ] = UNSET
    audio_tokens: Annotated[
        int | UnsetType, about("Tokens of the prompt that stand for audio clips, if it has any.")
    ] = UNSET


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """The purposes of the tokens that were produced, and the fate of drafts of them."""

    reasoning_tokens: Annotated[
        int, about("Tokens of reasoning, returned or not, with its marks.")
    ] = 0
    accepted_prediction_tokens: Annotated[
        int, about("Tokens that were drafted, and are part of the output.")
    ] = 0
    rejected_prediction_tokens: Annotated[
        int, about("Tokens that were drafted and computed, and aren't part of the output.")
    ] = 0


class UsageReply(msgspec.Struct):
    """Tokens that a request used."""

    prompt_tokens: Annotated[int, about("Tokens of the prompt.")]
    completion_tokens: Annotated[int, about("Tokens that were produced.")]
    total_tokens: Annotated[int, about("Both together.")]
    prompt_tokens_details: Annotated[PromptTokensDetails, about("Parts of the prompt's tokens.")]
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType,
        about("Parts of the output's tokens, if the model reasons or tokens were drafted."),
    ] = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: Annotated[str, about("The name.")]
    object: Annotated[str, about("Always `model`.")] = "model"
    created: Annotated[int, about("When the server began, in Unix seconds.")]
    owned_by: Annotated[str, about("Always `trioserve`.")] = "trioserve"
    root: Annotated[str, about("The model of that name; of an adapter, its folder.")]
    parent: Annotated[str | None, about("The model that the adapter is for.")] = None
    max_model_len: Annotated[int, about("Most tokens of prompt and output together.")]


class ModelList(msgspec.Struct):
    """The models that are served."""

    data: Annotated[list[ModelCard], about("One for each name.")]
    object: Annotated[str, about("Always `list`.")] = "list"
