"""The probability that a draft token is accepted, by its match and by sequence."""

from __future__ import annotations

import collections

import attrs

from gpu.sampling.drafting.sources import Draft, DraftKind

_DECAY = 0.97
"""Weight of what came before one more draft."""
_SKIPPED_DECAY = 0.995
"""Weight of what all sequences had before one more draft that wasn't verified."""
_PRIOR_WEIGHT = 8.0
_FIRST_GUESS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Shares accepted after matches of 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31 and more tokens."""
_MODEL_GUESS = 0.9
"""Share of a draft model's tokens accepted. It is high, because each draft takes a step of the
model: with a lower guess none would be tried, and nothing learned.
"""


@attrs.define
class Share:
    """A share with a prior; later observations count more."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: int, tried: int) -> None:
        """Add that ``accepted`` of ``tried`` draft tokens were accepted."""
        self.fade(_DECAY)
        self.accepted += accepted
        self.tried += tried

    def fade(self, weight: float) -> None:
        """Let earlier observations count less."""
        self.accepted *= weight
        self.tried *= weight

    def estimate(self, prior: float) -> float:
        """Return the expected share, near ``prior`` while little has been tried."""
        return (self.accepted + _PRIOR_WEIGHT * prior) / (self.tried + _PRIOR_WEIGHT)


class Acceptance:
    """Shares of accepted draft tokens, by the length of the match: over all sequences and by slot.

    Short matches say little of long ones, so they are counted apart. A draft's second token counts
    with the matches that are longer by one, and so on.
    """

    def __init__(self) -> None:
        self._by_length = {kind: [Share() for _ in _FIRST_GUESS] for kind in DraftKind}
        self._by_slot: dict[int, dict[int, Share]] = {}

    def open(self, slot: int) -> None:
        """Forget what is known of a slot."""
        self._by_slot.pop(slot, None)

    def probability(self, slot: int, draft: Draft) -> float:
        """Return the probability that the first token of a draft for ``slot`` is accepted."""
        return self._estimate(slot, draft.kind, _place(draft.kind, draft.match_length))

    def probabilities(self, slot: int, draft: Draft, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, … ``count`` tokens are all accepted.

        Each token that is accepted makes the match longer by one.
        """
        found: list[float] = []
        product, place, estimate = 1.0, -1, 1.0
        for length in range(draft.match_length, draft.match_length + count):
            if _place(draft.kind, length) != place:
                place = _place(draft.kind, length)
                estimate = self._estimate(slot, draft.kind, place)
            product *= estimate
            found.append(product)
        return found

    def _estimate(self, slot: int, kind: DraftKind, place: int) -> float:
        guess = _MODEL_GUESS if kind is DraftKind.MODEL else _FIRST_GUESS[place]
        prior = self._by_length[kind][place].estimate(guess)
        share = self._by_slot.get(slot, {}).get(place)
        return prior if share is None else share.estimate(prior)

    def skip(self, slot: int, draft: Draft) -> None:
        """Note that a draft wasn't verified, so that what was hard to draft gets new tries."""
        for share in self._by_slot.get(slot, {}).values():
            share.fade(_DECAY)
        self._by_length[draft.kind][_place(draft.kind, draft.match_length)].fade(_SKIPPED_DECAY)

    def add(self, slot: int, draft: Draft, accepted: int) -> None:
        """Note how many tokens of a draft for ``slot`` were accepted.

        The first token that isn't accepted ends the trial; those behind it say nothing.
        """
        tried = min(accepted + 1, len(draft.tokens))
        first = draft.match_length
        places = collections.Counter(
            _place(draft.kind, length) for length in range(first, first + tried)
        )
        refused_at = _place(draft.kind, first + accepted) if tried > accepted else None
        by_slot = self._by_slot.setdefault(slot, {})
        for place, number in places.items():
            agreed = number - (place == refused_at)
            by_slot.setdefault(place, Share()).add(agreed, number)
            self._by_length[draft.kind][place].add(agreed, number)


def _place(kind: DraftKind, match_length: int) -> int:
    """Return the place of a match's share; a model's drafts, which have no match, have one."""
    if kind is DraftKind.MODEL:
        return 0
    return min(max(match_length, 1).bit_length(), len(_FIRST_GUESS)) - 1
