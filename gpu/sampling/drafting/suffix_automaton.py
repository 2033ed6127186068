"""A suffix automaton: finds where the last tokens of a sequence have occurred before."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from gpu.sampling.drafting.occurrence import NOWHERE, Occurrence

_NONE = -1


class MatchPlace(NamedTuple):
    """A place in an automaton: a substring that is also the suffix of another sequence."""

    state: int
    length: int
    """Number of the substring's tokens."""


NO_PLACE = MatchPlace(0, 0)
"""The place of the empty substring."""


class SuffixAutomaton:
    """All substrings of the tokens appended so far, in time and memory linear in their number.

    The construction is that of Blumer et al., "The smallest automaton recognizing the subwords of a
    text" (1985). Its use for drafts is that of Hu et al., "SAM Decoding" (2024). Most states have
    one transition, which is in two arrays; only the others of a state are in a dict.
    """

    def __init__(self) -> None:
        self._token = array("i", [_NONE])
        self._next = array("i", [_NONE])
        self._others: dict[int, dict[int, int]] = {}
        self._link = array("i", [_NONE])
        self._length = array("i", [0])
        self._end = array("i", [0])
        """Number of tokens up to an occurrence's end; for looked-up states that of the latest."""
        self._last = 0
        self._size = 0
        self._match = NOWHERE

    @property
    def match(self) -> Occurrence:
        """The longest suffix of the tokens that also ends earlier, and where it did."""
        return self._match

    @property
    def num_states(self) -> int:
        """Number of states; less than twice the number of tokens, or 1."""
        return len(self._link)

    def append(self, token: int) -> None:
        """Append ``token``."""
        self._size += 1
        new = self._add(self._length[self._last] + 1, self._size)
        state = self._last
        while state != _NONE and self._following(state, token) == _NONE:
            self._lead(state, token, new)
            state = self._link[state]
        found = 0 if state == _NONE else self._suffix(state, token)
        self._link[new] = found
        self._last = new
        self._match = Occurrence(self._length[found], self._end[found]) if found else NOWHERE
        self._end[found] = self._size

    def follow(self, place: MatchPlace, token: int) -> MatchPlace:
        """Return the place of the longest suffix after ``token``, which follows that of ``place``.

        The automaton may have grown since it gave ``place``.
        """
        state, length = place
        while state and self._length[self._link[state]] >= length:
            # The state was split, and its link stands for the shorter substrings now.
            state = self._link[state]
        while state and self._following(state, token) == _NONE:
            state = self._link[state]
            length = self._length[state]
        following = self._following(state, token)
        return NO_PLACE if following == _NONE else MatchPlace(following, length + 1)

    def occurrence(self, place: MatchPlace) -> Occurrence:
        """Return an occurrence of the substring at ``place``."""
        return Occurrence(place.length, self._end[place.state]) if place.length else NOWHERE

    def _suffix(self, state: int, token: int) -> int:
        """Return the state of the tokens of ``state`` followed by ``token``, split off if need be.

        The state that ``token`` leads to may stand for longer substrings as well, which haven't
        occurred again.
        """
        found = self._following(state, token)
        if self._length[found] == self._length[state] + 1:
            return found
        split = self._add(self._length[state] + 1, self._end[found])
        self._token[split], self._next[split] = self._token[found], self._next[found]
        if found in self._others:
            self._others[split] = dict(self._others[found])
        self._link[split] = self._link[found]
        while state != _NONE and self._following(state, token) == found:
            self._lead(state, token, split)
            state = self._link[state]
        self._link[found] = split
        return split

    def _following(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        others = self._others.get(state)
        return _NONE if others is None else others.get(token, _NONE)

    def _lead(self, state: int, token: int, to: int) -> None:
        """Let ``token`` lead from ``state`` to another state."""
        if self._token[state] in (_NONE, token):
            self._token[state], self._next[state] = token, to
        else:
            self._others.setdefault(state, {})[token] = to

    def _add(self, length: int, end: int) -> int:
        for column, value in (
            *((self._token, _NONE), (self._next, _NONE), (self._link, _NONE)),
            *((self._length, length), (self._end, end)),
        ):
            column.append(value)
        return len(self._link) - 1
