"""Tokens that outputs may repeat, such as a predicted output or earlier ones, with their index."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from gpu.sampling.drafting.occurrence import Occurrence
from gpu.sampling.drafting.suffix_automaton import MatchPlace, SuffixAutomaton

BREAK = -2
"""Number in place of a token, before and between texts; nothing is drafted across it."""


class Corpus:
    """Tokens that only grow. They are indexed later than they are added, a few at a time."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._automaton = SuffixAutomaton()
        self._num_indexed = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, not indexed yet."""
        self._tokens.extend(tokens)

    def index(self, room: int) -> int:
        """Index up to ``room`` tokens more, and return how many these were."""
        first = self._num_indexed
        new = self._tokens[first : first + room]
        for token in new:
            self._automaton.append(token)
        self._num_indexed += len(new)
        return len(new)

    def follow(self, place: MatchPlace, token: int) -> MatchPlace:
        """See :meth:`~.suffix_automaton.SuffixAutomaton.follow`."""
        return self._automaton.follow(place, token)

    def occurrence(self, place: MatchPlace) -> Occurrence:
        """See :meth:`~.suffix_automaton.SuffixAutomaton.occurrence`."""
        return self._automaton.occurrence(place)

    def following(self, occurrence: Occurrence, most: int) -> list[int]:
        """Return the tokens that followed an occurrence, up to ``most`` or a :data:`BREAK`."""
        tokens = self._tokens[occurrence.end : occurrence.end + most].tolist()
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens
