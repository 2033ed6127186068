"""The sampling fields that all endpoints have under the same name, with the same meaning."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema import fields
from trioserve.http.api.schema.reading import TokenId, about


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What OpenAI, vLLM and SGLang call alike, and :class:`~trioserve.SamplingParams` too."""

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
            "Regular expressions that end the output where one matches, without look-around and "
            "back references; an empty one is none."
        ),
    ] = None
    stop_token_ids: Annotated[
        list[TokenId] | None, about("Tokens that end the output, beside the model's own.")
    ] = None
    ignore_eos: fields.IgnoreEos = None
    skip_special_tokens: fields.SkipSpecialTokens = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        about(
            "Leave the spaces between special tokens that a word-level tokenizer puts there; other "
            "tokenizers put none, whatever this says. True if it isn't given."
        ),
    ] = None


SHARED_NAMES = SamplingFields.__struct_fields__
