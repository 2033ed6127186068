"""Stop strings in pieces of text, against a search of the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trioserve.text.stop_strings import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_end(text: str, stops: list[str], not_before: int = 0) -> tuple[int, str] | None:
    """Return the earliest end after ``not_before`` characters, and the longest stop string
    there.
    """
    for end in range(max(not_before, 0) + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def cut_text(text: str, end: tuple[int, str] | None, *, include: bool) -> str:
    if end is None:
        return text
    return text[: end[0]] if include else text[: end[0] - len(end[1])]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def longest_beginning(text: str, stops: list[str]) -> int:
    """Return the number of characters at the end of ``text`` that may begin a stop string."""
    lengths = (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    sent = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=20), st.booleans())
def test_pieces_give_what_the_whole_text_gives(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    end = first_end(text, stops)
    expected = (cut_text(text, end, include=include), end and end[1])
    assert run(StopMatcher(stops, include=include), pieces_of(text, cuts)) == expected


@given(LETTERS, STOPS)
def test_exactly_the_possible_beginning_of_a_stop_string_is_held_back(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for position, character in enumerate(text, 1):
        now, stop = matcher.feed(character)
        sent += now
        if stop is not None:
            return
        length = longest_beginning(text[:position], stops)
        assert sent == text[: position - length]


@given(LETTERS, STOPS, st.integers(0, 30))
def test_matches_before_the_matcher_is_armed_are_text(
    text: str, stops: list[str], armed_from: int
) -> None:
    matcher = StopMatcher(stops)
    sent, stop = "", None
    for position, character in enumerate(text):
        now, stop = matcher.feed(character, armed=position >= armed_from)
        sent += now
        if stop is not None:
            break
    else:
        sent += matcher.flush()
    end = first_end(text, stops, not_before=armed_from)
    # Also for one that began before: its beginning was held back although a match didn't count yet.
    assert (sent, stop) == (cut_text(text, end, include=False), end and end[1])


def test_a_stop_string_over_many_pieces_is_never_seen() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    pieces = ["Hi", ".", "\n", "\n", "Us", "er", ": what", " more"]
    assert run(matcher, pieces) == ("Hi.", "\n\nUser:")


def test_a_false_start_is_sent_when_it_turns_out_to_be_one() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("go ST") == ("go ", None)
    assert matcher.feed("AY") == ("STAY", None)


def test_include_sends_at_once_and_cuts_behind_the_stop_string() -> None:
    matcher = StopMatcher(["STOP"], include=True)
    assert matcher.feed("go ST") == ("go ST", None)
    assert matcher.feed("OP it") == ("OP", "STOP")


def test_the_longest_of_those_that_end_first_is_found() -> None:
    assert StopMatcher(["bc", "abc", "abcd"]).feed("xabcd") == ("x", "abc")


def test_a_long_false_start_is_held_back_as_far_as_it_can_still_match() -> None:
    matcher = StopMatcher(["a" * 1000 + "b"])
    sent = "".join(matcher.feed("a" * 10)[0] for _ in range(500))
    assert len(sent) == 5000 - 1000
    assert matcher.feed("b") == ("", "a" * 1000 + "b")
