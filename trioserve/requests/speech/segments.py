"""The segments of a window's output, which has timestamps among its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.model_files.speech_config import SECONDS_OF_STATE, SpeechConfig


@attrs.frozen
class TokenSpan:
    """Tokens with the times of their beginning and end, in seconds from that of the window."""

    start: float
    end: float
    tokens: Sequence[int]


def spans_of(
    tokens: Sequence[int], seconds: float, config: SpeechConfig
) -> tuple[list[TokenSpan], float]:
    """Cut a window's output at its timestamps, as Whisper's published decoding does.

    A segment stands between two timestamps. One that isn't closed is left to the next window.

    Args:
        tokens: Output with timestamps, without the token of its end.
        seconds: Seconds of audio in the window.
        config: The model's tokens.

    Returns:
        The spans, and the seconds after which the next window begins, more than 0.
    """
    first = config.first_timestamp
    is_time = [token >= first for token in tokens]
    ends_alone = is_time[-2:] == [False, True]
    cuts = [at for at in range(1, len(tokens)) if is_time[at - 1] and is_time[at]]
    if not cuts:
        times = [_seconds(token, first) for token in tokens if token > first]
        return [TokenSpan(0.0, times[-1] if times else seconds, tokens)], seconds
    if ends_alone:
        cuts.append(len(tokens))
    spans = []
    begin = 0
    for cut in cuts:
        own = tokens[begin:cut]
        spans.append(TokenSpan(_seconds(own[0], first), _seconds(own[-1], first), own))
        begin = cut
    heard = seconds if ends_alone else _seconds(tokens[begin - 1], first)
    return spans, heard if 0 < heard <= seconds else seconds


def _seconds(token: int, first: int) -> float:
    return (token - first) * SECONDS_OF_STATE
