"""Whether the token that has come is the last one, and what it means if there was none."""

from __future__ import annotations

from trioserve.errors import EngineError, InvalidRequest
from trioserve.request import Finish, FinishReason, Sequence
from trioserve.sampling import SamplingParams

__all__ = ["ending", "no_token_error"]


def ending(sequence: Sequence) -> Finish | None:
    """How ``sequence`` ended with the token that it got last, None if it goes on."""
    token, num_output = sequence.output_ids[-1], len(sequence.output_ids)
    if sequence.sampler.is_stop(token, num_output):
        asked_for = token in sequence.request.params.stop_token_ids
        return Finish(FinishReason.STOP, stop_reason=token if asked_for else None)
    return Finish(FinishReason.LENGTH) if num_output == sequence.max_tokens else None


def no_token_error(params: SamplingParams) -> InvalidRequest | EngineError:
    """Why there was no token to draw: what the request masks, or else the model's own numbers."""
    masks = {
        "grammar": params.grammar is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "extra_args": bool(params.extra_args),
        "min_tokens": params.min_tokens > 0,
    }
    for name, is_used in masks.items():
        if is_used:
            return InvalidRequest("what the request allows leaves no token to draw", param=name)
    return EngineError("the model computed no token for this request: its logits hold NaN")
