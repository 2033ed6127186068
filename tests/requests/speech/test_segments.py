"""The segments of outputs with timestamps, and where the next window begins."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.support.tiny_speech import CONFIG
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.speech.segments import TokenSpan, spans_of
from trioserve.requests.speech.tasks import SpeechOptions, tokens_before

T = CONFIG.first_timestamp
"""The timestamp of 0 seconds; each further token is 0.02 s later."""


@pytest.mark.parametrize(
    ("tokens", "spans", "step"),
    [
        ([], [(0.0, 0.4, [])], 0.4),
        ([7, 8], [(0.0, 0.4, [7, 8])], 0.4),
        ([T, 7], [(0.0, 0.4, [T, 7])], 0.4),
        ([T, 7, T + 10], [(0.0, 0.2, [T, 7, T + 10])], 0.4),
        # An open segment is left to the next window.
        ([T, 7, T + 10, T + 10, 8], [(0.0, 0.2, [T, 7, T + 10])], 0.2),
        (
            [T, 7, T + 5, T + 6, 8, T + 15],
            [(0.0, 0.1, [T, 7, T + 5]), (0.12, 0.3, [T + 6, 8, T + 15])],
            0.4,
        ),
        ([T, 7, T + 5, T + 5, 8, T + 9, T + 9], None, 0.18),
        # The next window would begin at the same place.
        ([T, T, 8], [(0.0, 0.0, [T])], 0.4),
    ],
)
def test_spans(
    tokens: list[int], spans: list[tuple[float, float, list[int]]] | None, step: float
) -> None:
    found, seconds = spans_of(tokens, 0.4, CONFIG)
    assert seconds == pytest.approx(step)
    if spans is not None:
        wanted = [TokenSpan(pytest.approx(a), pytest.approx(b), own) for a, b, own in spans]
        assert found == wanted


def test_prompts_say_what_is_asked_for() -> None:
    options = SpeechOptions(task="translate")
    assert tokens_before(CONFIG, options, "de", []) == (31, 33, 34, 40)
    timed = SpeechOptions(timestamps=True)
    assert tokens_before(CONFIG, timed, "en", [1, 2]) == (38, 1, 2, 31, 32, 35)
    english = attrs.evolve(CONFIG, languages={}, tasks={})
    assert tokens_before(english, SpeechOptions(), "en", []) == (31, 40)
    SpeechOptions(language="en").check(english)
    sing: Any = "sing"
    number: Any = 3
    for wrong, param in (
        (options, "model"),
        (SpeechOptions(language="de"), "language"),
        (SpeechOptions(language=number), "language"),
        (SpeechOptions(prompt=number), "prompt"),
        (SpeechOptions(task=sing), "task"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            wrong.check(english)
        assert refused.value.param == param
