"""Stop conditions: the end of a sequence after a token, or for lack of one."""

from __future__ import annotations

import bisect

from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.protocol.sampling import NAN_LOGITS
from trioserve.requests.request import Finish, FinishReason, Sequence


def ending(sequence: Sequence) -> Finish | None:
    """Return the end of ``sequence`` if its last token ends it, else None."""
    return ending_of(sequence, sequence.output_ids)


def ending_of(sequence: Sequence, output_ids: list[int]) -> Finish | None:
    """Return the end of ``sequence`` with that output if the last token ends it, else None."""
    token, num_output = output_ids[-1], len(output_ids)
    if sequence.sampler.is_stop(token, num_output):
        asked_for = _has(sequence.request.params.stop_token_ids, token)
        return Finish(FinishReason.STOP, stop_reason=token if asked_for else None)
    return Finish(FinishReason.LENGTH) if num_output == sequence.max_tokens else None


def _has(ids: tuple[int, ...], token: int) -> bool:
    """Return True if ``token`` is one of ``ids``, which are sorted."""
    place = bisect.bisect_left(ids, token)
    return place < len(ids) and ids[place] == token


def ending_without_token(sequence: Sequence, token: int) -> Finish:
    """Return the end of a request with a row that gave no token, or with no token wanted.

    ``token`` is the row's value in place of one. If it isn't the one for NaN, the request's own
    masks are the reason, if it has any; otherwise the model's numbers are.
    """
    if sequence.max_tokens == 0:
        return Finish(FinishReason.LENGTH)
    return Finish(FinishReason.ERROR, error=_no_token_error(sequence, token))


def _no_token_error(sequence: Sequence, token: int) -> InvalidRequest | EngineError:
    params = sequence.request.params
    masks = {
        "grammar": params.grammar is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "extra_args": bool(params.extra_args),
        "logits_processors": bool(params.logits_processors),
        "min_tokens": params.min_tokens > 0 and bool(sequence.sampler.stop_ids),
    }
    for name, is_used in masks.items():
        if is_used and token != NAN_LOGITS:
            return InvalidRequest("what the request allows leaves no token to draw", param=name)
    return EngineError("the model computed no token for this request: its logits hold NaN")
