"""Sampling fields that all endpoints have under the same name, with the same meaning."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema import fields
from trioserve.http.api.schema.reading import TokenId, about


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields with the same name in OpenAI, vLLM, SGLang and :class:`~trioserve.SamplingParams`."""

    temperature: fields.Temperature = None
    top_p: fields.TopP = None
    top_k: fields.TopK = None
    min_p: fields.MinP = None
    repetition_penalty: fields.RepetitionPenalty = None
    frequency_penalty: fields.FrequencyPenalty = None
    presence_penalty: fields.PresencePenalty = None
    logit_bias: fields.LogitBias = None
    stop: fields.Stop = None
    stop_regex: Annotated[
        fields.StopStrings | None,
        about(
            "Regular expressions that end the output where one matches, without look-around "
            "and back references; an empty one has no effect."
        ),
    ] = None
    stop_token_ids: Annotated[
        list[TokenId] | None, about("Tokens that end the output, in addition to the model's own.")
    ] = None
    ignore_eos: fields.IgnoreEos = None
    skip_special_tokens: fields.SkipSpecialTokens = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        about(
            "Keep the spaces that a word-level tokenizer puts between special tokens; other "
            "tokenizers put none. True by default."
        ),
    ] = None
    speculative: Annotated[
        bool | None,
        about("False to compute this output without draft tokens. The output is the same."),
    ] = None


SHARED_NAMES = SamplingFields.__struct_fields__
