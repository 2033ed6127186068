"""A suffix automaton: finds where the last tokens of a sequence have occurred before."""

from __future__ import annotations

from gpu.sampling.drafting.occurrence import NOWHERE, Occurrence


class SuffixAutomaton:
    """All substrings of the tokens appended so far, in time and memory linear in their number.

    The construction is that of Blumer et al., "The smallest automaton recognizing the subwords of a
    text" (1985). Its use for drafts is that of Hu et al., "SAM Decoding" (2024).
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        """Number of tokens up to an occurrence's end; for looked-up states that of the latest."""
        self._last = 0
        self._size = 0
        self._match = NOWHERE

    @property
    def match(self) -> Occurrence:
        """The longest suffix of the tokens that also ends earlier, and where it did."""
        return self._match

    def append(self, token: int) -> None:
        """Append ``token``."""
        following, link, length = self._next, self._link, self._length
        self._size += 1
        new = self._add({}, -1, length[self._last] + 1, self._size)
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        link[new] = 0 if state < 0 else self._suffix(state, token)
        self._last = new
        found = link[new]
        self._match = Occurrence(length[found], self._end[found]) if found else NOWHERE
        self._end[found] = self._size

    def _suffix(self, state: int, token: int) -> int:
        """Return the state of the tokens of ``state`` followed by ``token``, split off if need be.

        The state that ``token`` leads to may stand for longer substrings as well, which haven't
        occurred again.
        """
        following, link, length = self._next, self._link, self._length
        found = following[state][token]
        if length[found] == length[state] + 1:
            return found
        split = self._add(dict(following[found]), link[found], length[state] + 1, self._end[found])
        while state >= 0 and following[state].get(token) == found:
            following[state][token] = split
            state = link[state]
        link[found] = split
        return split

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1
