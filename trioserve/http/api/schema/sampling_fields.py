"""Sampling fields that all endpoints have under the same name, with the same meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from trioserve.http.api.schema import fields
from trioserve.http.api.schema.reading import TokenId, about
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import MAX_BEAM_WIDTH


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
    beam_width: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=MAX_BEAM_WIDTH)] | None,
        about(
            "Number of beams of `use_beam_search`. By default it is `n`, or `best_of` where a "
            "completion has one."
        ),
    ] = None
    length_penalty: Annotated[
        Annotated[float, msgspec.Meta(ge=-100, le=100)] | None,
        about(
            "Exponent of an output's number of tokens by which `use_beam_search` divides its "
            "log-probability, to rank outputs; 1 by default."
        ),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        about(
            "The end of `use_beam_search`. True: when `beam_width` outputs are complete. False, "
            "the default: when no beam is better than they are. `never`: when none can become "
            "better."
        ),
    ] = None
    speculative: Annotated[
        bool | None,
        about("False to compute this output without draft tokens. The output is the same."),
    ] = None


SHARED_NAMES = SamplingFields.__struct_fields__

_WITHOUT_BEAMS: Mapping[str, Any] = {
    "beam_width": None,
    "length_penalty": 1.0,
    "early_stopping": False,
}
"""Fields of beam search, and their values that a request without one may have."""


def beam_width(
    fields: Mapping[str, Any], *, wanted: bool | None, best_of: int | None = None
) -> tuple[int | None, str]:
    """Return the number of beams, None without beam search, and the field that gives it.

    Raises:
        InvalidRequest: a field of beam search is given without it, or there are too many beams.
    """
    if not wanted:
        for name, value in _WITHOUT_BEAMS.items():
            if fields[name] not in (None, value):
                raise InvalidRequest(f"{name} needs use_beam_search to be true", param=name)
        return None, "beam_width"
    asked = {"beam_width": fields["beam_width"], "best_of": best_of, "n": fields["n"] or 1}
    name, width = next((name, given) for name, given in asked.items() if given is not None)
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(
            f"{name} must be at most {MAX_BEAM_WIDTH} with use_beam_search, got {width}", param=name
        )
    return width, name
