"""Drafts of open slots: looks them up, and learns how many are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.drafting.acceptance import Acceptance
from gpu.sampling.drafting.choice import LEAST_GAIN, choose_depth, choose_drafts
from gpu.sampling.drafting.recent_outputs import RecentOutputs
from gpu.sampling.drafting.sources import (
    AskedDraft,
    BatchSource,
    Draft,
    DraftKind,
    Source,
    make_sources,
)
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row, Slot
from trioserve.protocol.speculation import SpeculativeConfig

MAX_INDEXED_AT_ONCE = 1024
"""Most tokens that are indexed before a step, so that a long prompt holds up no other sequence."""


@attrs.define(eq=False)
class _OpenSlot:
    """An open slot, and its sources once drafts were looked up."""

    slot: Slot
    num_tokens: int
    """Number of its tokens when it was opened."""
    sources: list[Source] = attrs.field(factory=list)


class Drafter:
    """Drafts tokens by the method of ``config``.

    A slot's sources are brought up to date when drafts are asked for, so that slots without drafts
    cost nothing. With a ``batch_source``, all drafts are its.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        step_times: StepTimes,
        batch_source: BatchSource | None = None,
    ) -> None:
        self._config = config
        self._step_times = step_times
        self._batch_source = batch_source
        self._acceptance = Acceptance()
        self._recent = RecentOutputs()
        self._slots: dict[int, _OpenSlot] = {}

    def open(self, slot: Slot) -> None:
        """Begin with a sequence; forget an earlier one in the slot."""
        self._slots[slot.number] = _OpenSlot(slot, slot.num_tokens)
        self._acceptance.open(slot.number)
        if self._batch_source is not None:
            self._batch_source.open(slot)

    def close(self, number: int) -> None:
        """Forget a slot, but keep what was generated in it for drafts of others of its scope."""
        opened = self._slots.pop(number, None)
        if self._batch_source is not None:
            self._batch_source.close(number)
        if opened is None or not opened.slot.sampler.speculative:
            return
        slot = opened.slot
        # What had been generated before it was opened is there already.
        tokens = slot.tokens[max(slot.prompt_length, opened.num_tokens) :].tolist()
        output = [token for token in tokens if token >= 0]
        if output and self._config.method == "suffix":
            self._recent.add(slot.sampler.draft_scope, output)

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy pages as those of the KV cache are copied: [C, 2], source and destination."""
        if self._batch_source is not None:
            self._batch_source.copy_pages(copies)

    def propose(self, rows: Sequence[Row]) -> dict[int, Draft]:
        """Return drafts for some of ``rows``, by index, no more than ``Row.drafts`` each."""
        num_tokens = sum(row.count for row in rows)
        asking = [i for i, row in enumerate(rows) if row.drafts and row.slot.sampler.speculative]
        if self._batch_source is None:
            found = self._look_up(rows, asking, num_tokens)
        else:
            self._batch_source.note_pages(rows)
            found = self._ask(self._batch_source, rows, asking, num_tokens)
        if not found or not self._config.adaptive:
            return found
        return self._worth_their_time(rows, num_tokens, found)

    def _look_up(
        self, rows: Sequence[Row], asking: Sequence[int], num_tokens: int
    ) -> dict[int, Draft]:
        """Return drafts of each slot's sources for the rows ``asking``, if they could pay."""
        if not asking or not self._can_pay(num_tokens, sum(rows[i].drafts for i in asking)):
            return {}
        room = MAX_INDEXED_AT_ONCE
        found: dict[int, Draft] = {}
        for i in asking:
            slot = rows[i].slot
            sources = self._sources(slot)
            for source in sources:
                room -= source.update(slot, room)
            drafts = filter(None, [source.look_up(slot, rows[i].drafts) for source in sources])
            best = max(drafts, key=lambda draft: self._probability(slot, draft), default=None)
            if best is not None:
                found[i] = best
        return found

    def _ask(
        self, source: BatchSource, rows: Sequence[Row], asking: Sequence[int], num_tokens: int
    ) -> dict[int, Draft]:
        """Return drafts of ``source`` for the rows ``asking``, as long as is worth the time."""
        most = max((rows[i].drafts for i in asking), default=0)
        if most and self._config.adaptive:
            guess = Draft([], 1, DraftKind.MODEL)
            candidates = [(rows[i].drafts, self._probability(rows[i].slot, guess)) for i in asking]
            most = choose_depth(
                num_tokens, candidates, self._step_times.seconds, source.seconds(len(asking))
            )
            if not most:
                for i in asking:
                    self._acceptance.skip(rows[i].slot.number)
        if not most:
            return {}
        asked = {i: AskedDraft(rows[i].slot, min(rows[i].drafts, most)) for i in asking}
        return source.look_up(asked)

    def _sources(self, slot: Slot) -> list[Source]:
        opened = self._slots[slot.number]
        if not opened.sources:
            opened.sources = make_sources(self._config, slot, self._recent)
        return opened.sources

    def _probability(self, slot: Slot, draft: Draft) -> float:
        return self._acceptance.probability(slot.number, draft)

    def _worth_their_time(
        self, rows: Sequence[Row], num_tokens: int, found: Mapping[int, Draft]
    ) -> dict[int, Draft]:
        """Return as much of the drafts ``found`` as gives the most tokens per second."""
        candidates = [
            (len(draft.tokens), self._probability(rows[i].slot, draft))
            for i, draft in found.items()
        ]
        chosen = choose_drafts(num_tokens, candidates, self._step_times.seconds)
        drafts: dict[int, Draft] = {}
        for (i, draft), count in zip(found.items(), chosen, strict=True):
            if count:
                drafts[i] = attrs.evolve(draft, tokens=draft.tokens[:count])
            else:
                self._acceptance.skip(rows[i].slot.number)
        return drafts

    def observe(
        self, rows: Sequence[Row], drafts: Mapping[int, Draft], accepted: Mapping[int, int]
    ) -> None:
        """Note how many of the drafts of a row were accepted; all are by the row's index."""
        for i, draft in drafts.items():
            self._acceptance.add(rows[i].slot.number, draft, accepted[i])

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
