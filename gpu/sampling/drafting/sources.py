"""Sources of drafts for one sequence: its own tokens, a predicted output, and recent outputs."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.drafting.corpus import BREAK, Corpus
from gpu.sampling.drafting.ngram_index import NgramIndex
from gpu.sampling.drafting.occurrence import SuffixIndex
from gpu.sampling.drafting.recent_outputs import RecentOutputs
from gpu.sampling.drafting.suffix_automaton import NO_PLACE, MatchPlace, SuffixAutomaton
from gpu.slots import Row, Slot
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.wire import ints

MAX_INDEXED = 1 << 15
"""Most tokens of a sequence that are indexed; of a longer one, the last."""
_LONGEST_MATCH = 64
"""Tokens before the last that are looked up in a corpus that a sequence begins to follow."""


class DraftKind(enum.IntEnum):
    """Origin of a draft."""

    OWN = 0
    PREDICTION = 1
    RECENT = 2
    MODEL = 3


@attrs.frozen
class Draft:
    """Draft tokens of one row, and the length and the kind of the match that they come from."""

    tokens: list[int]
    match_length: int
    kind: DraftKind = DraftKind.OWN


class Source(Protocol):
    """A source of drafts for one slot."""

    def update(self, slot: Slot, room: int) -> int:
        """Read the slot's new tokens, and index up to ``room``; return how many were indexed."""
        ...

    def look_up(self, slot: Slot, most: int) -> Draft | None:
        """Return at most ``most`` tokens that may come next; None if none are known."""
        ...


@attrs.frozen
class AskedDraft:
    """A request for at most ``most`` draft tokens of a slot."""

    slot: Slot
    most: int


class BatchSource(Protocol):
    """A source of drafts for all slots of a step together, such as a model."""

    def open(self, slot: Slot) -> None:
        """Begin with a slot, whose pages are in the slot table."""
        ...

    def close(self, number: int) -> None:
        """Forget a slot; it may not be open."""
        ...

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages as those of the KV cache are copied: [C, 2], source and destination."""
        ...

    def forget_pages(self, numbers: Sequence[int]) -> None:
        """Note that these pages are written with content that isn't from here."""

    def note_pages(self, rows: Sequence[Row]) -> None:
        """Note the pages that the slots of ``rows`` have got; every step is to be told."""
        ...

    def seconds(self, num_rows: int) -> float:
        """Return the time that one more draft of each of so many rows takes."""
        ...

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        """Return drafts for some of ``asked``, under the same numbers."""
        ...


class OwnTokens:
    """The tokens of the sequence itself."""

    def __init__(self, config: SpeculativeConfig, slot: Slot) -> None:
        self._config = config
        self._start_anew(slot)

    def _start_anew(self, slot: Slot) -> None:
        self._begin = max(slot.num_tokens - MAX_INDEXED, 0)
        self._size = 0
        self._index = self._make_index()

    def _make_index(self) -> SuffixIndex:
        if self._config.method == "ngram":
            return NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return SuffixAutomaton()

    def update(self, slot: Slot, room: int) -> int:
        """See :class:`Source`."""
        if self._size > 2 * MAX_INDEXED:
            self._start_anew(slot)
        first = self._begin + self._size
        new = slot.tokens[first : first + room].tolist()
        for token in new:
            self._index.append(token)
        self._size += len(new)
        return len(new)

    def look_up(self, slot: Slot, most: int) -> Draft | None:
        """See :class:`Source`. There is none until all tokens are indexed."""
        match = self._index.match
        is_behind = self._begin + self._size < slot.num_tokens
        if is_behind or match.length < self._config.prompt_lookup_min:
            return None
        begin = self._begin + match.end
        tokens = slot.tokens[begin : begin + most].tolist()
        while tokens and len(tokens) < most:
            # The occurrence overlaps the suffix, so what follows repeats.
            tokens += tokens[: most - len(tokens)]
        return Draft(tokens, match.length)


@attrs.define(eq=False)
class Followed:
    """The place of a sequence in a corpus."""

    corpus: Corpus
    place: MatchPlace
    num_read: int
    """Number of the sequence's tokens that led to the place."""

    def update(self, slot: Slot, room: int) -> int:
        """See :class:`Source`."""
        num_indexed = self.corpus.index(room)
        first = max(self.num_read, slot.num_tokens - _LONGEST_MATCH)
        if first > self.num_read:
            self.place = NO_PLACE
        for token in slot.tokens[first:].tolist():
            self.place = self.corpus.follow(self.place, token)
        self.num_read = slot.num_tokens
        return num_indexed

    def draft(self, kind: DraftKind, shortest: int, most: int) -> Draft | None:
        """Return what followed a match of at least ``shortest`` tokens."""
        occurrence = self.corpus.occurrence(self.place)
        if occurrence.length < shortest:
            return None
        tokens = self.corpus.following(occurrence, most)
        return Draft(tokens, occurrence.length, kind) if tokens else None


class Prediction:
    """The output that the request predicts. Its beginning is drafted where the output begins."""

    def __init__(self, slot: Slot) -> None:
        corpus = Corpus()
        corpus.extend([BREAK, *ints(slot.sampler.prediction).tolist()])
        corpus.index(1)
        self._followed = Followed(corpus, corpus.follow(NO_PLACE, BREAK), slot.prompt_length)

    def update(self, slot: Slot, room: int) -> int:
        """See :class:`Source`."""
        return self._followed.update(slot, room)

    def look_up(self, slot: Slot, most: int) -> Draft | None:
        """See :class:`Source`."""
        return self._followed.draft(DraftKind.PREDICTION, 1, most)


class Recent:
    """Recent outputs of the slot's scope."""

    def __init__(self, config: SpeculativeConfig, outputs: RecentOutputs) -> None:
        self._config = config
        self._outputs = outputs
        self._followed: list[Followed] = []

    def update(self, slot: Slot, room: int) -> int:
        """See :class:`Source`."""
        corpora = self._outputs.corpora(slot.sampler.draft_scope)
        known = {id(followed.corpus): followed for followed in self._followed}
        self._followed = [
            known.get(id(corpus)) or Followed(corpus, NO_PLACE, 0) for corpus in corpora
        ]
        num_indexed = 0
        for followed in self._followed:
            num_indexed += followed.update(slot, room - num_indexed)
        return num_indexed

    def look_up(self, slot: Slot, most: int) -> Draft | None:
        """See :class:`Source`. The longest match counts."""
        shortest = self._config.prompt_lookup_min
        found = [followed.draft(DraftKind.RECENT, shortest, most) for followed in self._followed]
        return max(filter(None, found), key=lambda draft: draft.match_length, default=None)


def make_sources(config: SpeculativeConfig, slot: Slot, recent: RecentOutputs) -> list[Source]:
    """Return the sources of a slot's drafts."""
    sources: list[Source] = [OwnTokens(config, slot)]
    if slot.sampler.prediction:
        sources.append(Prediction(slot))
    if config.method == "suffix":
        sources.append(Recent(config, recent))
    return sources
