"""An index of n-grams: finds where the last few tokens of a sequence have occurred before."""

from __future__ import annotations

from collections import deque

from gpu.sampling.drafting.occurrence import NOWHERE, Occurrence


class NgramIndex:
    """The latest end of every n-gram of ``shortest`` to ``longest`` tokens.

    The look-up is that of vLLM's ``ngram`` method: the longest n-gram that has occurred counts.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._recent: deque[int] = deque(maxlen=longest)
        self._ends: dict[tuple[int, ...], int] = {}
        self._size = 0
        self._match = NOWHERE

    @property
    def match(self) -> Occurrence:
        """See :class:`~.occurrence.SuffixIndex`."""
        return self._match

    def append(self, token: int) -> None:
        """See :class:`~.occurrence.SuffixIndex`."""
        self._size += 1
        self._recent.append(token)
        recent, self._match = tuple(self._recent), NOWHERE
        for size in self._sizes:
            if size > len(recent):
                continue
            ngram = recent[-size:]
            end = self._ends.get(ngram)
            if end is not None and not self._match.length:
                self._match = Occurrence(size, end)
            self._ends[ngram] = self._size
