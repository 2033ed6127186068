"""Drafts of open slots: looks them up, and learns how many are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from gpu.sampling.drafting.acceptance import Acceptance
from gpu.sampling.drafting.choice import LEAST_GAIN, choose_drafts
from gpu.sampling.drafting.ngram_index import NgramIndex
from gpu.sampling.drafting.occurrence import SuffixIndex
from gpu.sampling.drafting.step_times import StepTimes
from gpu.sampling.drafting.suffix_automaton import SuffixAutomaton
from gpu.slots import Row, Slot
from trioserve.protocol.speculation import SpeculativeConfig

MAX_INDEXED = 1 << 15
"""Most tokens of a sequence that are indexed; of a longer one, the last."""
MAX_INDEXED_AT_ONCE = 1024
"""Most tokens that are indexed before a step, so that a long prompt holds up no other sequence."""


@attrs.define(eq=False)
class _Indexed:
    """The index of a slot's tokens from ``begin`` on, of which ``size`` are in it."""

    index: SuffixIndex
    begin: int
    size: int = 0


@attrs.frozen
class Draft:
    """Draft tokens of one row, and the length of the match that they come from."""

    tokens: list[int]
    match_length: int


class Drafter:
    """Drafts tokens by the method of ``config``.

    A slot's index is brought up to date when drafts are asked for, so that slots without drafts
    cost nothing.
    """

    def __init__(self, config: SpeculativeConfig, step_times: StepTimes) -> None:
        self._config = config
        self._step_times = step_times
        self._acceptance = Acceptance()
        self._slots: dict[int, _Indexed] = {}

    def open(self, slot: Slot) -> None:
        """Forget what was indexed of an earlier sequence in the slot."""
        self.close(slot.number)
        self._acceptance.open(slot.number)

    def close(self, number: int) -> None:
        """Forget a slot."""
        self._slots.pop(number, None)

    def propose(self, rows: Sequence[Row]) -> dict[int, Draft]:
        """Return drafts for some of ``rows``, by index, no more than ``Row.drafts`` each."""
        num_tokens = sum(row.count for row in rows)
        asking = [i for i, row in enumerate(rows) if row.drafts and row.slot.sampler.speculative]
        if not asking or not self._can_pay(num_tokens, sum(rows[i].drafts for i in asking)):
            return {}
        room = MAX_INDEXED_AT_ONCE
        found: dict[int, Draft] = {}
        for i in asking:
            indexed, added = self._up_to_date(rows[i].slot, room)
            room -= added
            draft = self._look_up(rows[i], indexed)
            if draft is not None:
                found[i] = draft
        return self._worth_their_time(rows, num_tokens, found) if self._config.adaptive else found

    def _worth_their_time(
        self, rows: Sequence[Row], num_tokens: int, found: Mapping[int, Draft]
    ) -> dict[int, Draft]:
        """Return as much of the drafts ``found`` as gives the most tokens per second."""
        candidates = [
            (
                len(draft.tokens),
                self._acceptance.probability(rows[i].slot.number, draft.match_length),
            )
            for i, draft in found.items()
        ]
        chosen = choose_drafts(num_tokens, candidates, self._step_times.seconds)
        drafts: dict[int, Draft] = {}
        for (i, draft), count in zip(found.items(), chosen, strict=True):
            if count:
                drafts[i] = Draft(draft.tokens[:count], draft.match_length)
            else:
                self._acceptance.skip(rows[i].slot.number)
        return drafts

    def observe(
        self, rows: Sequence[Row], drafts: Mapping[int, Draft], accepted: Mapping[int, int]
    ) -> None:
        """Note how many of the drafts of a row were accepted; all are by the row's index."""
        for i, draft in drafts.items():
            number = rows[i].slot.number
            self._acceptance.add(number, draft.match_length, accepted[i], len(draft.tokens))

    def observe_time(self, num_tokens: int, num_drafts: int, seconds: float) -> None:
        """Note the time of a step without prompts."""
        self._step_times.observe(num_tokens, num_drafts, seconds)

    def _can_pay(self, num_tokens: int, num_drafts: int) -> bool:
        """Return whether drafts would pay if all of them were accepted, or need not."""
        if not self._config.adaptive:
            return True
        seconds = self._step_times.seconds
        rate = LEAST_GAIN * num_tokens / seconds(num_tokens)
        sizes = (1 << bit for bit in range(num_drafts.bit_length()))
        return any((num_tokens + size) / seconds(num_tokens, size) > rate for size in sizes)

    def _look_up(self, row: Row, indexed: _Indexed) -> Draft | None:
        """Return what followed the longest earlier occurrence of the slot's last tokens.

        None if there is none, or not all tokens are indexed yet.
        """
        slot, match = row.slot, indexed.index.match
        is_behind = indexed.begin + indexed.size < slot.num_tokens
        if is_behind or match.length < self._config.prompt_lookup_min:
            return None
        most, begin = row.drafts, indexed.begin + match.end
        tokens = slot.tokens[begin : begin + most].tolist()
        while tokens and len(tokens) < most:
            # The occurrence overlaps the suffix, so what follows repeats.
            tokens += tokens[: most - len(tokens)]
        return Draft(tokens, match.length)

    def _make_index(self) -> SuffixIndex:
        if self._config.method == "ngram":
            return NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return SuffixAutomaton()

    def _up_to_date(self, slot: Slot, room: int) -> tuple[_Indexed, int]:
        """Index up to ``room`` tokens of a slot more; return the index, and how many these were."""
        indexed = self._slots.get(slot.number)
        if indexed is None or indexed.size > 2 * MAX_INDEXED:
            begin = max(slot.num_tokens - MAX_INDEXED, 0)
            indexed = self._slots[slot.number] = _Indexed(self._make_index(), begin)
        first = indexed.begin + indexed.size
        new = slot.tokens[first : first + room].tolist()
        for token in new:
            indexed.index.append(token)
        indexed.size += len(new)
        return indexed, len(new)
