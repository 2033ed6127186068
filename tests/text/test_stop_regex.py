"""Stop regexes in pieces of text, against Python's ``re`` on every part of each whole prefix."""

from __future__ import annotations

import itertools
import re

import pytest
import regex
from hypothesis import assume, example, given
from hypothesis import strategies as st

from trioserve.protocol.errors import InvalidRequest
from trioserve.text import regex_automaton
from trioserve.text.regex_syntax import parse
from trioserve.text.stop_regex import (
    MAX_EXPANDED_CHARACTERS,
    MAX_MATCH_CHARACTERS,
    STEPS_AT_FIRST,
    STEPS_PER_PIECE,
    RegexStopMatcher,
    SearchBudget,
    check_stop_regex,
)
from trioserve.text.stop_strings import StopMatcher

PIECES = st.lists(st.text(alphabet="abA \n", max_size=4), max_size=8)
LITERALS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)

SETS = [
    "a",
    "b",
    "B",
    ".",
    "[ab]",
    "[^a]",
    "[^\\n-a]",
    r"\n",
    r"\s",
    r"\S",
    r"\w",
    r"[\Wb]",
    r"\x61",
]
ASSERTIONS = ["^", r"\Z", r"\A", r"\b", r"\B", "(?m:^)", "(?m:$)"]


def groups(atoms: list[str]) -> st.SearchStrategy[str]:
    return st.recursive(
        st.sampled_from(atoms),
        lambda inner: st.one_of(
            st.builds(lambda x, y: x + y, inner, inner),
            st.builds(lambda x, y: f"(?:{x}|{y})", inner, inner),
            st.builds(lambda x: f"({x})", inner),
            st.builds(
                lambda flag, x: f"(?{flag}:{x})", st.sampled_from(["i", "s", "-s", "x"]), inner
            ),
            st.builds(
                lambda x, count: f"(?:{x}){count}",
                inner,
                st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "{0}"]),
            ),
        ),
        max_leaves=6,
    )


PLAIN_PATTERNS = groups([*SETS, "ab", "aba"])
PATTERNS = groups([*SETS, *ASSERTIONS, "ab"])


def ends_at(pattern: str, text: str, start: int, end: int) -> bool:
    """Return whether ``text`` has a match that begins and ends at these places."""
    exact = re.compile(rf"(?:{pattern})(?=[\s\S]{{{len(text) - end}}}\Z)")
    return exact.match(text, start) is not None


def reference(
    pieces: list[str], stops: list[str], patterns: list[str], *, include: bool
) -> tuple[str, list[str | None]]:
    """Return the output's text and the possible names of its end, stop strings before regexes."""
    conditions = [
        *((stop, re.escape(stop)) for stop in stops),
        *zip(patterns, patterns, strict=True),
    ]
    text = ""
    for piece in pieces:
        before, text = len(text), text + piece
        places = range(before, len(text) + 1) if piece else ()
        for start, end in ((first, last) for last in places for first in range(last)):
            names = [name for name, pattern in conditions if ends_at(pattern, text, start, end)]
            if names:
                first = names[:1] if names[0] in stops else names
                return text[: end if include else start], [*first]
    return text, [None]


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


def check_or_skip(patterns: list[str]) -> None:
    try:
        check_stop_regex(patterns)
    except InvalidRequest as error:
        assert "matches the empty text" in str(error)  # noqa: PT017
        assume(False)


@given(
    PIECES,
    st.lists(PATTERNS, min_size=1, max_size=2),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=1),
    st.booleans(),
)
@example(["ab", "a", " b"], [r"a\b"], [], False)
@example(["A", "a"], [r".a\Z"], ["a"], True)
@example(["Aa A"], [r".a\b"], ["a"], False)
@example(["ab", "a\n", "b"], [r"b\B.\Z|\n(?m:^)b"], [], True)
def test_the_first_end_of_a_match_wins_then_the_longest(
    pieces: list[str], patterns: list[str], stops: list[str], include: bool
) -> None:
    check_or_skip(patterns)
    text, stop = run(matcher_of(stops, patterns, include=include), pieces)
    expected, names = reference(pieces, stops, patterns, include=include)
    assert text == expected
    assert stop in names


@given(st.lists(PLAIN_PATTERNS, min_size=1, max_size=2), st.text(alphabet="abA \n", max_size=12))
def test_exactly_what_may_become_a_match_is_held_back(patterns: list[str], text: str) -> None:
    check_or_skip(patterns)
    matcher = matcher_of([], patterns)
    # The reference holds back more where repetition is lazy.
    patterns = [pattern.replace("*?", "*").replace("+?", "+") for pattern in patterns]
    sent, stop = "", None
    for length, character in enumerate(text, 1):
        released, stop = matcher.feed(character)
        sent += released
        if stop is not None:
            break
        places = (
            start
            for start in range(length)
            for pattern in patterns
            if regex.compile(pattern).fullmatch(text, start, length, partial=True)
        )
        earliest = min(places, default=length)
        assert len(sent) == earliest


def test_a_refusal_of_the_empty_text_is_right() -> None:
    for pattern in ("a*", "(a|)", "^", "$", r"\b", r"(?:a?b?){3}", "^a*$", "(?:)", "a{0}", "(?#x)"):
        with pytest.raises(InvalidRequest, match="matches the empty text"):
            check_stop_regex(["x", pattern])


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
    assert matcher_of([], ["a+"], include=True).feed("xaab") == ("xa", "a+")


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


def test_a_match_that_was_complete_too_early_is_not_lengthened() -> None:
    matcher = matcher_of([], ["ab*|xyz"])
    assert matcher.feed("xa", armed=False) == ("xa", None)
    assert matcher.feed("bb-xy", armed=False) == ("bb-", None)
    assert matcher.feed("z") == ("", "ab*|xyz")


def test_an_assertion_waits_for_the_next_character() -> None:
    matcher = matcher_of([], [r"so\Bme"])
    assert [matcher.feed(piece)[0] for piece in ("so", "m", "x")] == ["", "", "somx"]
    matcher = matcher_of([], [r"so\Bme"])
    assert matcher.feed("so") == ("", None)
    assert matcher.feed("me") == ("", r"so\Bme")
    assert matcher_of([], [r"END\b"]).feed("ENDS END!") == ("ENDS ", r"END\b")


def test_an_assertion_holds_at_the_end_of_the_text_so_far() -> None:
    assert matcher_of([], [r"END\b"]).feed("the END") == ("the ", r"END\b")
    assert matcher_of([], ["d$"]).feed("added") == ("adde", "d$")
    matcher = matcher_of([], [r"x\b"])
    assert matcher.feed("-x", armed=False) == ("-", None)
    assert matcher.feed("y x") == ("xy ", r"x\b")


def test_a_match_has_a_longest_length() -> None:
    matcher = matcher_of([], ["(?s)<.*>"])
    inside = "<" + "x" * (MAX_MATCH_CHARACTERS - 2)
    assert matcher.feed(inside) == ("", None)
    assert matcher.feed(">") == ("", "(?s)<.*>")
    matcher = matcher_of([], ["(?s)<.*>"])
    assert matcher.feed(inside) == ("", None)
    assert matcher.feed("yz") == (f"{inside}yz", None)
    assert matcher.feed(">")[1] is None
    assert matcher.feed("<>") == ("", "(?s)<.*>")


def test_a_long_text_has_one_beginning() -> None:
    matcher = matcher_of([], ["^x", r"\By"])
    for _ in range(5000):
        assert matcher.feed("x" if _ else "-")[1] is None
    for _ in range(300):
        assert matcher.feed("-y")[1] is None
    assert matcher.feed("y")[1] == r"\By"


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (["("], r"'\(' is no valid regex: missing \)"),
        ([")"], r"unbalanced \)"),
        (["a", "[z-a]"], "bad character range"),
        (["[a"], "has no end"),
        (["a{3,2}"], "the smaller count must come first"),
        (["a{10000000}"], "a count is larger than 9999"),
        (["a**"], "multiple repeat"),
        (["a|*"], "nothing to repeat"),
        (["a\\"], "a backslash at the end"),
        ([r"\x4"], "wants 2 hex digits"),
        ([r"\y"], r"bad escape \\y"),
        (["(?P<1>a)"], "bad name of a group"),
        (["a(?i)b"], "flags for all must come first"),
        (["(" * 500 + "a" + ")" * 500], "nested deeper than 50"),
        (["a*"], "'a\\*' matches the empty text"),
        (["$"], "matches the empty text"),
        (["x" * 500, "y" * 600], "at most 1024 characters together, got 1100"),
        (["a{600}"], f"at most {MAX_EXPANDED_CHARACTERS} characters when repetitions are written"),
        ([r"(?:\w{100}){100}"], "when repetitions are written out"),
        ([r"(a{1000}){1000}"], "when repetitions are written out"),
        ([r"(?x)(?:(?:\w {50}) {50}) {50}"], "when repetitions are written out"),
    ],
)
def test_patterns_that_are_refused(patterns: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_stop_regex(patterns)
    assert caught.value.param == "stop_regex"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        *((look, "look-around") for look in ("a(?=b)", "(?!b)a", "(?<=b)a", "(?<!b)a")),
        *((back, "a back reference") for back in (r"(a)\1", r"(?P<x>a)(?P=x)", r"(?<x>a)\g<x>")),
        ("(a)(?(1)b|c)", "a back reference or condition"),
        *(
            (self, "recursion")
            for self in ("a(?R)", "(a)(?1)", "(?<n>a)(?&n)", "(a)(?-1)", "(?P>n)")
        ),
        ("(?>a+)b", "an atomic group"),
        ("a++b", "possessive repetition"),
        ("a{2}+b", "possessive repetition"),
        ("(?|a|b)", "a branch reset"),
        ("(*PRUNE)a", "a verb"),
        *(
            (fuzzy, "fuzzy")
            for fuzzy in ("(?:ab){e<3}", "(ab){e<3:[z]}", "(ab){e}", "(ab){1<=e<=3}")
        ),
        (r"a\Kb", "an escape"),
        (r"\Ga", "an escape"),
        (r"\p{Han}", "a Unicode property"),
        ("[[:alpha:]]", "a POSIX class"),
        ("(?r)ab", "the flag r"),
        ("(?V1)[a--b]", "the flag V"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pattern: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}.* not supported") as caught:
        check_stop_regex([pattern])
    assert caught.value.param == "stop_regex"


def test_usual_patterns_pass() -> None:
    check_stop_regex(
        [
            r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
            r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            r"(?i)\n\s*(?:user|human):",
            r"(?:[A-Z][a-z]+ ){2,5}said",
            r'"\s*}\s*{"',
        ]
    )


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        (r"\p{Lu}", "AÄЖ", "aä1"),
        (r"\PL", "1 -", "aä"),
        (r"[\p{Nd}\p{^Zs}]", "1a", "\u00a0 "),
        (r"[]\-a]", "]-a", "b["),
        (r"[^]]", "[a", "]"),
        (r"[a\b-]", "a\b-", "c"),
        (r"\u00e9|\0|\U0001F600", "é\0😀", "e0"),
        ("(?i)[k-ms]", "kKL\u017f\u212as", "jnN"),
        ("(?i)é|\u017f", "éÉ\u017fsS", "e"),
        ("(?x) a # b\n | \\ ", "a ", "b#"),
        (r"\d", "1٣", "²a"),
    ],
)
def test_sets_and_escapes(pattern: str, matched: str, others: str) -> None:
    for character in matched:
        assert matcher_of([], [pattern]).feed(character) == ("", pattern), character
    for character in others:
        assert matcher_of([], [pattern]).feed(character) == (character, None), character


def test_a_pattern_that_others_try_for_ever_is_quick() -> None:
    matcher = matcher_of([], ["(a|aa)+$b|(a+)+c"])
    assert matcher.feed("a" * 4000 + "-") == ("a" * 4000 + "-", None)
    assert matcher.feed("aac") == ("", "(a|aa)+$b|(a+)+c")


COSTLY = "[ab].{400}c"
"""Each character begins a match, so that there are soon 400 threads."""


def test_searches_that_take_many_steps_end_their_request() -> None:
    matcher = matcher_of([], [COSTLY])
    pieces = 0
    with pytest.raises(InvalidRequest, match="takes too long to search for") as caught:
        while True:
            matcher.feed("abab")
            pieces += 1
            assert pieces < 1000
    assert caught.value.param == "stop_regex"
    assert pieces > 30


def test_the_outputs_of_a_request_have_one_budget() -> None:
    budget = SearchBudget()
    first, second = (RegexStopMatcher([], [COSTLY], budget) for _ in range(2))
    assert first.feed("ab" * 40) == ("", None)
    assert STEPS_PER_PIECE < STEPS_AT_FIRST - budget.steps < STEPS_AT_FIRST
    budget.steps = -STEPS_PER_PIECE
    with pytest.raises(InvalidRequest, match="takes too long"):
        second.feed("a")


def test_an_automaton_remembers_little() -> None:
    automaton = regex_automaton.Automaton([parse(r"[^\d].{500}\d")], max_positions=512)
    search = regex_automaton.Search(automaton)
    for place in range(1200):
        search.advance(chr(0x4E00 + place), place, armed=True)
        if place > 40:
            search.forget(place - 40)
    symbols = automaton.symbols.values()
    assert 1 <= len(symbols) <= regex_automaton.MAX_SYMBOLS
    moves = sum(len(moves) for symbol in set(symbols) for moves in symbol.moves)
    assert 1 <= moves <= regex_automaton.MAX_MOVES
