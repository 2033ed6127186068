"""Recent outputs, of which later ones may repeat parts; kept apart by scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gpu.sampling.drafting.corpus import BREAK, Corpus

MAX_TOKENS = 8192
"""Tokens after which a new corpus of a scope is begun; of the others, the newest is kept."""
MAX_SCOPES = 16
"""Number of scopes that are kept: those used last."""
_MAX_CORPORA = 2


class RecentOutputs:
    """The outputs of sequences that have ended, by scope.

    A scope's corpora are bounded: tokens can't be taken out of an index, so a full corpus is
    followed by a new one and dropped later, as a whole.
    """

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, list[Corpus]] = OrderedDict()

    def corpora(self, scope: str) -> Sequence[Corpus]:
        """Return the corpora of a scope, at most two."""
        return self._scopes.get(scope, ())

    def add(self, scope: str, tokens: list[int]) -> None:
        """Add an output; of a long one, the last :data:`MAX_TOKENS` tokens."""
        corpora = self._scopes.setdefault(scope, [])
        self._scopes.move_to_end(scope)
        if not corpora or len(corpora[-1]) >= MAX_TOKENS:
            corpora.append(Corpus())
            del corpora[:-_MAX_CORPORA]
        corpora[-1].extend([*tokens[-MAX_TOKENS:], BREAK])
        if len(self._scopes) > MAX_SCOPES:
            self._scopes.popitem(last=False)
