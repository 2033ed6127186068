"""A sequence's place in tokens of others, and outputs that are kept for a while, by scope."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies

from gpu.sampling.drafting import recent_outputs
from gpu.sampling.drafting.corpus import BREAK, Corpus
from gpu.sampling.drafting.occurrence import Occurrence
from gpu.sampling.drafting.recent_outputs import MAX_SCOPES, RecentOutputs
from gpu.sampling.drafting.suffix_automaton import NO_PLACE

TOKENS = strategies.lists(strategies.integers(0, 2), max_size=40)


def longest_in(corpus: Sequence[int], read: Sequence[int]) -> int:
    """Return the length of the longest suffix of ``read`` that occurs in ``corpus``."""

    def occurs(length: int) -> bool:
        suffix = list(read[len(read) - length :])
        starts = range(len(corpus) - length + 1)
        return any(list(corpus[start : start + length]) == suffix for start in starts)

    return max((length for length in range(1, len(read) + 1) if occurs(length)), default=0)


@hypothesis.given(TOKENS, TOKENS, TOKENS)
def test_a_place_is_that_of_the_longest_suffix(
    first: list[int], more: list[int], read: list[int]
) -> None:
    """The corpus grows between the tokens that are read, and old places stay right."""
    corpus, tokens, place = Corpus(), list(first), NO_PLACE
    corpus.extend(first)
    corpus.index(len(first))
    for number, token in enumerate(read):
        if number < len(more):
            corpus.extend(more[number : number + 1])
            assert corpus.index(5) == 1
            tokens.append(more[number])
        before = place.length
        place = corpus.follow(place, token)
        found = corpus.occurrence(place)
        assert found.length <= before + 1
        # What was read before the corpus grew may occur in it now: that isn't looked up again.
        assert found.length <= longest_in(tokens, read[: number + 1])
        if number >= len(more) and not more:
            assert found.length == longest_in(tokens, read[: number + 1])
        if found.length:
            occurred = tokens[found.end - found.length : found.end]
            assert occurred == read[number + 1 - found.length : number + 1]


def test_nothing_is_drafted_across_a_break() -> None:
    corpus = Corpus()
    corpus.extend([1, 2, 3, BREAK, 4])
    assert corpus.following(Occurrence(1, 1), 8) == [2, 3]
    assert corpus.following(Occurrence(1, 1), 1) == [2]
    assert corpus.following(Occurrence(3, 3), 8) == []


def test_tokens_are_indexed_a_few_at_a_time() -> None:
    corpus = Corpus()
    corpus.extend(range(10))
    assert [corpus.index(4) for _ in range(4)] == [4, 4, 2, 0]
    assert len(corpus) == 10


def test_outputs_are_kept_by_scope_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_outputs, "MAX_TOKENS", 4)
    outputs = RecentOutputs()
    outputs.add("a", [1, 2, 3])
    outputs.add("a", [4, 5, 6, 7, 8])
    outputs.add("a", [9])
    assert [list_of(corpus) for corpus in outputs.corpora("a")] == [
        [5, 6, 7, 8, BREAK],
        [9, BREAK],
    ]
    assert outputs.corpora("b") == ()


def list_of(corpus: Corpus) -> list[int]:
    return corpus._tokens.tolist()


def test_the_scopes_used_last_are_kept() -> None:
    outputs = RecentOutputs()
    for number in range(MAX_SCOPES):
        outputs.add(str(number), [1])
    outputs.add("0", [2])
    outputs.add("new", [3])
    assert outputs.corpora("1") == ()
    assert len(outputs.corpora("0")) == len(outputs.corpora("new")) == 1
