"""Stop regexes in pieces of text, against ``regex.search`` on each whole prefix."""

from __future__ import annotations

import itertools
import time

import pytest
import regex
from hypothesis import assume, given
from hypothesis import strategies as st

from trioserve.errors import InvalidRequest
from trioserve.text.stop_regex import (
    MAX_MATCH_CHARACTERS,
    SEARCH_SECONDS,
    SECONDS_AT_FIRST,
    SECONDS_PER_PIECE,
    RegexStopMatcher,
    SearchBudget,
    check_stop_regex,
)
from trioserve.text.stop_strings import StopMatcher

PIECES = st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12)
LITERALS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", r"\n", "^", "$", r"\s", "ab", "aba"])
GROUPS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda x, y: x + y, inner, inner),
        st.builds(lambda x, y: f"(?:{x}|{y})", inner, inner),
        st.builds(
            lambda x, count: f"(?:{x}){count}",
            inner,
            st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "*?", "+?"]),
        ),
        st.builds(
            lambda kind, x: f"({kind}{x})", st.sampled_from(["?=", "?!", "?<=", "?<!"]), inner
        ),
    ),
    max_leaves=5,
)
PATTERNS = st.one_of(GROUPS, st.builds(lambda x, y: f"({x}){y}\\1", GROUPS, GROUPS))


def reference(
    pieces: list[str], stops: list[str], patterns: list[str], *, include: bool, armed_from: int = 0
) -> tuple[str, str | None]:
    """The output's text and what ended it; ``armed_from`` counts pieces."""
    conditions = [
        *((stop, regex.compile(regex.escape(stop))) for stop in stops),
        *((pattern, regex.compile(pattern)) for pattern in patterns),
    ]
    skip = [0] * len(conditions)
    text = ""
    for number, piece in enumerate(pieces):
        text += piece
        found = []
        for which, (stop, pattern) in enumerate(conditions):
            while skip[which] <= len(text) and (match := pattern.search(text, skip[which])):
                if piece and number >= armed_from:
                    found.append((match.end(), match.start(), which, stop))
                    break
                skip[which] = match.start() + 1
        if found and piece:
            end, start, _, stop = min(found)
            return text[: end if include else start], stop
    return text, None


def matcher_of(stops: list[str], patterns: list[str], *, include: bool = False) -> RegexStopMatcher:
    return RegexStopMatcher(stops, patterns, SearchBudget(), include=include)


def run(
    matcher: RegexStopMatcher | StopMatcher, pieces: list[str], armed_from: int = 0
) -> tuple[str, str | None]:
    sent = ""
    for number, piece in enumerate(pieces):
        text, stop = matcher.feed(piece, armed=number >= armed_from)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


def may_be_empty(pattern: str) -> bool:
    return regex.compile(pattern).search("") is not None


@given(
    PIECES,
    st.lists(PATTERNS, min_size=1, max_size=2),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=1),
    st.booleans(),
    st.integers(0, 6),
)
def test_the_earliest_token_with_a_match_in_the_whole_text_wins(
    pieces: list[str], patterns: list[str], stops: list[str], include: bool, armed_from: int
) -> None:
    assume(not any(map(may_be_empty, patterns)))
    check_stop_regex(patterns)
    matcher = matcher_of(stops, patterns, include=include)
    text, stop = run(matcher, pieces, armed_from)
    expected = reference(pieces, stops, patterns, include=include, armed_from=armed_from)
    if expected[1] is not None and (include or any("$" in pattern for pattern in patterns)):
        # Nothing is held back, or too little: what follows a match's beginning may be out already.
        assert stop == expected[1]
        assert text.startswith(expected[0])
    else:
        assert (text, stop) == expected


@given(PIECES, LITERALS, st.booleans(), st.integers(0, 6), st.booleans())
def test_regexes_of_plain_letters_are_stop_strings(
    pieces: list[str], stops: list[str], include: bool, armed_from: int, as_regex: bool
) -> None:
    ours = matcher_of([] if as_regex else stops, stops if as_regex else [], include=include)
    expected = run(StopMatcher(stops, include=include), pieces, armed_from)
    assert run(ours, pieces, armed_from) == expected


def sent_after_each(matcher: RegexStopMatcher, pieces: list[str]) -> list[str]:
    return list(itertools.accumulate(matcher.feed(piece)[0] for piece in pieces))


def test_what_may_become_a_match_is_held_back_and_nothing_else() -> None:
    matcher = matcher_of([], [r"\n\d+\."])
    pieces = ["one", "\n", "1", "2", " two\n", "3", ".x"]
    assert sent_after_each(matcher, pieces) == [
        *("one", "one", "one", "one", "one\n12 two", "one\n12 two", "one\n12 two")
    ]
    assert matcher_of([], ["a+"], include=True).feed("xaab") == ("xaa", "a+")


def test_the_first_to_end_wins_and_a_stop_string_before_a_regex() -> None:
    assert matcher_of(["long stop"], ["st"]).feed("a long stop") == ("a long ", "st")
    assert matcher_of(["stop"], ["st.p"]).feed("a stop") == ("a ", "stop")
    assert matcher_of(["op"], ["stop"]).feed("a stop") == ("a ", "stop")


def test_the_earliest_beginning_of_a_match_is_held_back() -> None:
    matcher = matcher_of([], ["abxy", "xz"])
    assert matcher.feed("-abx") == ("-", None)
    assert matcher.feed("-") == ("abx-", None)


def test_matches_that_came_too_early_do_not_hide_later_ones() -> None:
    matcher = matcher_of([], ["x"])
    assert matcher.feed("x" * 1000, armed=False) == ("x" * 1000, None)
    assert matcher.feed("yx") == ("y", "x")


def test_what_was_sent_is_not_sent_again() -> None:
    matcher = matcher_of([], [r"so\Bme"])
    assert [matcher.feed(piece)[0] for piece in ("so", "m", "x")] == ["so", "", "mx"]


def test_an_assertion_at_the_text_s_end_is_found_even_so() -> None:
    # At the end of "so" the pattern can't match and doesn't say that it may: "so" is sent.
    matcher = matcher_of([], [r"so\Bme"])
    assert matcher.feed("so") == ("so", None)
    assert matcher.feed("me") == ("", r"so\Bme")


def test_a_match_has_a_longest_length() -> None:
    matcher = matcher_of([], ["(?s)<.*>"])
    inside = "<" + "x" * (MAX_MATCH_CHARACTERS - 2)
    assert matcher.feed(inside) == ("", None)
    assert matcher.feed(">") == ("", "(?s)<.*>")
    matcher = matcher_of([], ["(?s)<.*>"])
    assert matcher.feed(inside) == ("", None)
    assert matcher.feed("yz") == ("<", None)
    for _ in range(200):
        matcher.feed("y")
    assert matcher.feed(">")[1] is None
    assert matcher.feed("<>") == ("", "(?s)<.*>")


def test_a_text_that_was_cut_off_has_no_new_beginning() -> None:
    matcher = matcher_of([], ["^x", "(?<!-)y"])
    for _ in range(5000):
        assert matcher.feed("x" if _ else "-")[1] is None
    for _ in range(300):
        assert matcher.feed("-y")[1] is None
    assert matcher.feed("y")[1] == "(?<!-)y"


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (["("], r"'\(' is no valid regex: missing \)"),
        (["a", "[z-a]"], "is no valid regex: bad character range"),
        (["(" * 500 + "a" + ")" * 500], "is no valid regex: maximum recursion depth"),
        (["(?r)ab"], "searches backwards"),
        (["a*"], "'a\\*' matches the empty text"),
        (["$"], "matches the empty text"),
        (["x" * 500, "y" * 600], "at most 1024 characters together, got 1100"),
        (["a{5000}"], "at most 4096 characters when repetitions are written out"),
        ([r"(?:\w{100}){100}"], "when repetitions are written out"),
        ([r"(?x)(?:(?:\w {50}) {50}) {50}"], "when repetitions are written out"),
    ],
)
def test_patterns_that_are_refused(patterns: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_stop_regex(patterns)
    assert caught.value.param == "stop_regex"


def test_usual_patterns_pass() -> None:
    check_stop_regex(
        [
            r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
            r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            r"(?i)\n\s*(?:user|human):",
            r"(?:[A-Z][a-z]+ ){2,5}said",
        ]
    )


def test_a_pattern_that_takes_for_ever_ends_its_request_soon() -> None:
    matcher = matcher_of([], ["(a|aa)+$b"])
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match="takes too long to search for") as caught:
        matcher.feed("a" * 60 + "c")
    assert caught.value.param == "stop_regex"
    # Generous, for clocks that tick seldom; without the limit this takes centuries.
    assert time.thread_time() - started < 50 * SEARCH_SECONDS


def test_searches_that_are_slow_together_end_their_request_too() -> None:
    matcher = matcher_of([], [r"(a.*b){2}\d"])
    pieces = 0
    with pytest.raises(InvalidRequest, match="takes too long"):
        while True:
            matcher.feed("aaaa")
            pieces += 1
            assert pieces < 100_000
    assert pieces > SECONDS_AT_FIRST / SEARCH_SECONDS


def test_the_outputs_of_a_request_have_one_budget() -> None:
    budget = SearchBudget()
    first, second = (RegexStopMatcher([], ["(a|aa)+$b"], budget) for _ in range(2))
    assert first.feed("a" * 20 + "c") == ("a" * 20 + "c", None)
    spent = SECONDS_AT_FIRST + SECONDS_PER_PIECE - budget.seconds
    assert 0 < spent < SECONDS_AT_FIRST
    budget.seconds = -1.0
    with pytest.raises(InvalidRequest, match="takes too long"):
        second.feed("a")
