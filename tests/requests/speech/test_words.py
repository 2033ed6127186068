"""The words of a transcript are those of transformers, together they are its text."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from tests.support.tiny_speech import CONFIG
from trioserve.requests.speech.transcript import Segment, Word
from trioserve.requests.speech.words import has_spaces, with_words, words_of

PIECES = [
    *(b" Hello", b" a", b"b", b"'t", b"12", b" 3", b"-", b" -", b",", b".", b"...", b"?", b"!"),
    *(b" (", b"(", b")", b' "', b'"', b" [", b"]", b" \xc2\xbf", b":", b"%"),
    *("é".encode(), "語".encode(), "、".encode(), b" \xe2\x82\xac"),
    *(b"\xe6\x97\xa5", b"\xe6", b"\x97", b"\xa5"),
]
"""Bytes of tokens; the last three are those of a character."""
texts = st.lists(
    st.sampled_from(PIECES[:-3]).map(lambda piece: [piece]) | st.just(PIECES[-3:]), max_size=12
).map(lambda runs: [piece for run in runs for piece in run])


@given(texts, st.booleans())
@example([b" Hello", b",", b" (", b'"', b"a", b")", b"."], True)
def test_words_are_those_of_transformers(pieces: list[bytes], is_spaced: bool) -> None:
    tokenizer = SimpleNamespace(
        decode=lambda tokens, **_: b"".join(pieces[token] for token in tokens).decode(
            "utf-8", "replace"
        ),
        eos_token_id=len(pieces),
    )
    wanted, _, _ = _combine_tokens_into_words(
        tokenizer, list(range(len(pieces))), "english" if is_spaced else "japanese"
    )
    assert [each.text for each in words_of(pieces, is_spaced=is_spaced)] == wanted


@given(st.lists(st.binary(max_size=4) | st.sampled_from(PIECES), max_size=9), st.booleans())
def test_words_are_the_text(pieces: list[bytes], is_spaced: bool) -> None:
    words = words_of(pieces, is_spaced=is_spaced)
    text = b"".join(pieces).decode("utf-8", "replace")
    assert "".join(each.text for each in words) == text
    assert all(each.text.strip() for each in words) or len(words) == 1
    bounds = [bound for each in words for bound in (each.begin, each.end)]
    assert bounds == sorted(bounds)
    assert all(0 <= each.begin < each.end <= len(pieces) for each in words)


def test_punctuation_has_no_time_of_its_own() -> None:
    pieces = [b" He", b"llo", b",", b" (", b'"', b"you", b'"', b"."]
    found = [(each.text, each.begin, each.end) for each in words_of(pieces, is_spaced=True)]
    assert found == [(" Hello,", 0, 2), (' ("you".', 4, 6)]


@pytest.mark.parametrize(
    ("language", "task", "spaced"),
    [("en", "transcribe", True), ("ja", "transcribe", False), ("ja", "translate", True)],
)
def test_languages_without_spaces(language: str, task: str, spaced: bool) -> None:
    assert has_spaces(language, task) == spaced  # type: ignore[arg-type]


SEGMENT = Segment(
    start=2.0,
    end=3.0,
    text="",
    token_ids=(),
    window_start=0.0,
    average_logprob=0.0,
    no_speech_prob=0.0,
    temperature=0.0,
)


def test_segments_get_their_words() -> None:
    first = CONFIG.first_timestamp
    texts = {1: b" one", 2: b" two", 3: b"s", 4: b"."}
    segments = [
        attrs.evolve(SEGMENT, token_ids=(first, 1, first + 3)),
        attrs.evolve(SEGMENT, token_ids=(first + 3, 2, 3, 4, first + 9)),
    ]
    times = [2.0, 2.25, 2.5, 2.75, 3.0]
    found = with_words(segments, times, texts.__getitem__, CONFIG, is_spaced=True)
    assert [each.words for each in found] == [
        (Word(start=2.0, end=2.25, text=" one"),),
        (Word(start=2.25, end=2.75, text=" twos."),),
    ]
    assert [attrs.evolve(each, words=()) for each in found] == segments


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ([1.0, 2.25, 2.5, 3.75], [(2.0, 2.25), (2.25, 2.5), (2.5, 3.0)]),
        ([1.5, 2.25, 2.75, 3.5], [(1.5, 2.25), (2.25, 2.75), (2.75, 3.5)]),
        ([1.0, 2.0, 3.0, 4.0], [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]),
    ],
)
def test_pauses_around_a_segment_are_left_out(
    times: list[float], wanted: list[tuple[float, float]]
) -> None:
    segment = attrs.evolve(SEGMENT, token_ids=(1, 1, 1))
    (found,) = with_words([segment], times, lambda _: b" a", CONFIG, is_spaced=True)
    assert [(each.start, each.end) for each in found.words] == wanted


def test_the_first_word_of_a_window_is_shortened() -> None:
    """Its beginning isn't measured. It may have twice the time of half of the words."""
    segment = attrs.evolve(SEGMENT, start=0.0, end=9.0, token_ids=(1, 1, 1, 1))
    for times, start in (
        ([0.0, 3.0, 3.25, 3.5, 3.75], 2.5),
        ([0.0, 3.0, 6.0, 6.0, 6.0], 1.6),
        ([2.75, 3.0, 3.25, 3.5, 3.75], 2.75),
        ([3.0, 3.0, 3.0, 3.0, 3.0], 3.0),
    ):
        (found,) = with_words([segment], times, lambda _: b" a", CONFIG, is_spaced=True)
        assert found.words[0] == Word(start=start, end=times[1], text=" a")
        assert [each.end for each in found.words] == times[1:]


def test_a_pause_on_both_sides_of_one_word_is_left_out() -> None:
    segment = attrs.evolve(SEGMENT, token_ids=(1,))
    (found,) = with_words([segment], [0.0, 9.0], lambda _: b" a", CONFIG, is_spaced=True)
    assert found.words == (Word(start=2.0, end=3.0, text=" a"),)
