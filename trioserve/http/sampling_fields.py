"""The sampling fields that all endpoints have under the same name, with the same meaning."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.schemas import (
    LogitBias,
    Penalty,
    Probability,
    StopStrings,
    Temperature,
    TokenId,
    TopK,
    TopP,
    about,
)

__all__ = ["SHARED_NAMES", "SamplingFields"]


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What OpenAI, vLLM and SGLang call alike, and :class:`~trioserve.SamplingParams` too."""

    temperature: Annotated[
        Temperature | None, about("Divides the logits; 0 takes the most probable token.")
    ] = None
    top_p: Annotated[
        TopP | None, about("Draw from the fewest tokens whose probability together reaches it.")
    ] = None
    top_k: Annotated[TopK | None, about("Draw from as many best tokens; -1 or 0 for all.")] = None
    min_p: Annotated[
        Probability | None,
        about("Draw from tokens at least this many times as probable as the best one."),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        about("Above 1, makes tokens of prompt and output less probable; below 1, more."),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, about("Taken off a token's logit for each time it is in the output.")
    ] = None
    presence_penalty: Annotated[
        Penalty | None, about("Taken off a token's logit if it is in the output.")
    ] = None
    logit_bias: Annotated[
        LogitBias | None, about("Added to logits: numbers by token id, which is a string.")
    ] = None
    stop: Annotated[
        StopStrings | None,
        about(
            "Strings that end the output where they first occur in its text; an empty one is none."
        ),
    ] = None
    stop_regex: Annotated[
        StopStrings | None,
        about("Regular expressions that end the output where one matches; an empty one is none."),
    ] = None
    stop_token_ids: Annotated[
        list[TokenId] | None, about("Tokens that end the output, beside the model's own.")
    ] = None
    ignore_eos: Annotated[
        bool | None, about("Don't end the output at the model's own end of sequence.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, about("Leave special tokens out of the text; true if it isn't given.")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        about(
            "Leave the spaces between special tokens that a word-level tokenizer puts there; other "
            "tokenizers put none, whatever this says. True if it isn't given."
        ),
    ] = None


SHARED_NAMES = SamplingFields.__struct_fields__
