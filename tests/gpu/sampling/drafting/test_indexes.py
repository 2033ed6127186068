"""Both indexes find what a search through all tokens finds."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
from hypothesis import strategies

from gpu.sampling.drafting.ngram_index import NgramIndex
from gpu.sampling.drafting.suffix_automaton import SuffixAutomaton

TOKENS = strategies.lists(strategies.integers(0, 2), max_size=60)


def ends_of(tokens: Sequence[int], length: int) -> list[int]:
    """Return the ends of earlier occurrences of the last ``length`` tokens."""
    suffix, size = list(tokens[len(tokens) - length :]), len(tokens)
    return [end for end in range(length, size) if list(tokens[end - length : end]) == suffix]


@hypothesis.given(TOKENS)
def test_the_automaton_finds_the_longest_suffix_that_occurred(tokens: list[int]) -> None:
    index = SuffixAutomaton()
    for size, token in enumerate(tokens, 1):
        index.append(token)
        seen = tokens[:size]
        longest = max((n for n in range(1, size) if ends_of(seen, n)), default=0)
        assert index.match.length == longest
        if longest:
            assert index.match.end in ends_of(seen, longest)


def test_the_automaton_prefers_what_it_found_last() -> None:
    """The suffix 1 2 is followed by 3 at first, then by 4."""
    index = SuffixAutomaton()
    for token in (1, 2, 3, 0, 1, 2, 4, 9, 1, 2):
        index.append(token)
    assert index.match == (2, 6)


@hypothesis.given(TOKENS, strategies.integers(1, 3), strategies.integers(0, 3))
def test_the_ngrams_find_the_latest_of_the_longest(
    tokens: list[int], shortest: int, more: int
) -> None:
    index = NgramIndex(shortest, shortest + more)
    for size, token in enumerate(tokens, 1):
        index.append(token)
        seen = tokens[:size]
        sizes = range(shortest, min(shortest + more, size - 1) + 1)
        longest = max((n for n in sizes if ends_of(seen, n)), default=0)
        assert index.match.length == longest
        if longest:
            assert index.match.end == max(ends_of(seen, longest))


def test_an_automaton_is_linear_in_its_tokens() -> None:
    index = SuffixAutomaton()
    for number in range(4000):
        index.append(number * number % 97)
    assert 4000 < index.num_states < 2 * 4000
