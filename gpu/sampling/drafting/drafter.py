"""Drafts of open slots: looks them up, and learns how many are accepted."""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping, Sequence

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from gpu.sampling.drafting.acceptance import Acceptance
from gpu.sampling.drafting.budget import DraftBudget
from gpu.sampling.drafting.choice import (
    LEAST_GAIN,
    choose_depth,
    choose_drafts,
    first_within,
)
from gpu.sampling.drafting.pause import DraftPause
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
from gpu.sampling.drawn import Drawn
from gpu.slots import Row, Slot
from trioserve.protocol.speculation import SpeculativeConfig

MAX_INDEXED_AT_ONCE = 1024
"""Most tokens that are indexed before a step, so that a long prompt holds up no other sequence."""

MAX_TRIED = 8
"""Most slots that a step looks up drafts for, besides those whose last drafts were accepted. With
many slots few drafts pay, and looking them up takes time.
"""


@attrs.define(eq=False)
class _OpenSlot:
    """An open slot, and its sources once drafts were looked up."""

    slot: Slot
    num_tokens: int
    """Number of its tokens when it was opened."""
    sources: list[Source] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class DraftedStep:
    """The rows of a step with the number of their drafts, and these drafts by the row's index."""

    rows: Sequence[Row]
    drafts: Mapping[int, Draft]
    search_seconds: float | None
    """Seconds by which finding drafts delays steps; None if none were looked for."""


class Drafter:
    """Drafts tokens by the method of ``config``.

    A slot's sources are brought up to date when drafts are asked for, so that slots without drafts
    cost nothing. With a ``batch_source``, all drafts are its. Steps with other slots may get their
    drafts before the result of a step is there.
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
        self._accepting: set[int] = set()
        """Slots whose last drafts were accepted, if only in part."""
        self._first_tried = 0
        """Slot from which on others are tried next."""
        self._pause = DraftPause() if batch_source is None else DraftBudget()

    def open(self, slot: Slot) -> None:
        """Begin with a sequence; forget an earlier one in the slot."""
        self._slots[slot.number] = _OpenSlot(slot, slot.num_tokens)
        self._acceptance.open(slot.number)
        self._pause.open()
        if self._batch_source is not None:
            self._batch_source.open(slot)

    def close(self, number: int) -> None:
        """Forget a slot, but keep what was generated in it for drafts of others of its scope."""
        opened = self._slots.pop(number, None)
        self._accepting.discard(number)
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

    def forget_pages(self, numbers: Sequence[int]) -> None:
        """Note that these pages are written with content that isn't from here."""
        if self._batch_source is not None:
            self._batch_source.forget_pages(numbers)

    def add_drafts(
        self, rows: Sequence[Row], room: int | None = None, share: float = 1.0
    ) -> DraftedStep:
        """Write the drafts that a step is to verify behind the tokens of their slots.

        All tokens of the slots that may have drafts are known. Rows get no more than ``Row.drafts``
        each, and ``room`` together. Finding them delays steps by a ``share`` of its time.
        """
        drafts, search_seconds = self._propose(rows, room, share)
        added: list[Row] = []
        for i, row in enumerate(rows):
            count = 0
            if i in drafts:
                row.slot.draft(drafts[i].tokens)
                count = len(drafts[i].tokens)
            added.append(msgspec.structs.replace(row, drafts=count) if row.drafts else row)
        return DraftedStep(added, drafts, search_seconds)

    def learn(self, step: DraftedStep, drawn: Drawn, seconds: float) -> None:
        """Note how long a step took, and how many of its drafts were accepted.

        ``step`` is that of :meth:`add_drafts`; its ``search_seconds`` are part of ``seconds``.
        """
        rows, num_accepted = step.rows, 0
        if step.drafts:
            assert drawn.counts is not None
            sampling = [i for i, row in enumerate(rows) if row.samples]
            accepted = dict(zip(sampling, (drawn.counts - 1).tolist(), strict=True))
            for i, draft in step.drafts.items():
                number = rows[i].slot.number
                self._acceptance.add(number, draft, accepted[i])
                num_accepted += accepted[i]
                (self._accepting.add if accepted[i] else self._accepting.discard)(number)
        if rows:
            self._note_times(step, num_accepted, seconds)

    def _note_times(self, step: DraftedStep, num_accepted: int, seconds: float) -> None:
        rows = step.rows
        num_tokens, num_drafts = sum(row.count for row in rows), sum(row.drafts for row in rows)
        search = step.search_seconds or 0.0
        if num_tokens == len(rows):
            # The time of a draft model is a part of its own in the choice of a depth.
            self._step_times.observe(num_tokens, num_drafts, seconds - search)
        if step.search_seconds is None:
            return
        num_sampling = sum(row.samples for row in rows)
        without = self._step_times.seconds(num_tokens)
        took = self._step_times.seconds(num_tokens, num_drafts) + search
        if self._batch_source is not None and num_drafts and num_tokens == len(rows):
            took = seconds  # what a draft model takes away from the step counts, too
        gained = num_accepted * self._step_times.seconds(num_sampling) / num_sampling
        saved = gained + without - took
        self._pause.note(len(rows), saved, without, has_drafts=num_drafts > 0)

    def _propose(
        self, rows: Sequence[Row], room: int | None, share: float
    ) -> tuple[dict[int, Draft], float | None]:
        """Return drafts by the row's index, and :attr:`DraftedStep.search_seconds`."""
        if self._batch_source is not None:
            self._batch_source.note_pages(rows)
        if room is not None and room <= 0:
            return {}, None
        num_tokens = sum(row.count for row in rows)
        asking = [i for i, row in enumerate(rows) if row.drafts and row.slot.sampler.speculative]
        if not asking or (self._config.adaptive and self._pause.includes(len(self._slots))):
            return {}, None
        began = time.perf_counter()
        if self._batch_source is None:
            found = self._look_up(rows, asking, num_tokens)
        else:
            draft_seconds = self._batch_source.seconds(len(asking)) * share
            found = self._ask(self._batch_source, rows, asking, num_tokens, room, draft_seconds)
        search_seconds = (time.perf_counter() - began) * share
        if not found:
            return found, search_seconds
        chosen = self._choose(rows, num_tokens, found, room)
        drafts: dict[int, Draft] = {}
        for (i, draft), count in zip(found.items(), chosen, strict=True):
            if count:
                drafts[i] = attrs.evolve(draft, tokens=draft.tokens[:count])
            else:
                self._acceptance.skip(rows[i].slot.number, draft)
        return drafts, search_seconds

    def _look_up(
        self, rows: Sequence[Row], asking: Sequence[int], num_tokens: int
    ) -> dict[int, Draft]:
        """Return drafts of each slot's sources for the rows ``asking``, if they could pay."""
        if not self._can_pay(num_tokens, sum(rows[i].drafts for i in asking)):
            return {}
        room = MAX_INDEXED_AT_ONCE
        found: dict[int, Draft] = {}
        for i in self._in_turn(rows, asking):
            slot = rows[i].slot
            sources = self._sources(slot)
            for source in sources:
                room -= source.update(slot, room)
            drafts = filter(None, [source.look_up(slot, rows[i].drafts) for source in sources])
            best = max(
                drafts,
                key=lambda draft: self._acceptance.probability(slot.number, draft),
                default=None,
            )
            if best is not None:
                found[i] = best
        return found

    def _in_turn(self, rows: Sequence[Row], asking: Sequence[int]) -> Sequence[int]:
        """Return the rows of ``asking`` to look up drafts for; others have their turns later."""
        if len(asking) <= MAX_TRIED:
            return asking
        by_number = sorted((rows[i].slot.number, i) for i in asking)
        first = bisect.bisect_left(by_number, (self._first_tried, 0))
        others = [each for each in by_number[first:] + by_number[:first]
                  if each[0] not in self._accepting]  # fmt: skip
        self._first_tried = others[MAX_TRIED][0] if len(others) > MAX_TRIED else 0
        tried = {i for _, i in others[:MAX_TRIED]}
        return [i for i in asking if i in tried or rows[i].slot.number in self._accepting]

    def _ask(
        self,
        source: BatchSource,
        rows: Sequence[Row],
        asking: Sequence[int],
        num_tokens: int,
        room: int | None,
        draft_seconds: float,
    ) -> dict[int, Draft]:
        """Return drafts of ``source`` for the rows ``asking``, as long as is worth the time.

        None is longer than an even share of ``room``, rounded up. One more draft of each takes
        ``draft_seconds``.
        """
        most = max((rows[i].drafts for i in asking), default=0)
        if most and room is not None:
            most = min(most, -(-room // len(asking)))
        if most and self._config.adaptive:
            guess = Draft([], 1, DraftKind.MODEL)
            candidates = [
                self._probabilities(rows[i].slot, guess, min(rows[i].drafts, most)) for i in asking
            ]
            most = choose_depth(num_tokens, candidates, self._step_times.seconds, draft_seconds)
            if not most:
                for i in asking:
                    self._acceptance.skip(rows[i].slot.number, guess)
        if not most:
            return {}
        asked = {i: AskedDraft(rows[i].slot, min(rows[i].drafts, most)) for i in asking}
        return source.look_up(asked)

    def _sources(self, slot: Slot) -> list[Source]:
        opened = self._slots[slot.number]
        if not opened.sources:
            opened.sources = make_sources(self._config, slot, self._recent)
        return opened.sources

    def _probabilities(self, slot: Slot, draft: Draft, count: int) -> list[float]:
        return self._acceptance.probabilities(slot.number, draft, count)

    def _choose(
        self, rows: Sequence[Row], num_tokens: int, found: Mapping[int, Draft], room: int | None
    ) -> list[int]:
        """Return how many of each draft are verified, at most ``room`` together."""
        if not self._config.adaptive:
            return first_within(room, [len(draft.tokens) for draft in found.values()])
        candidates = [
            self._probabilities(rows[i].slot, draft, len(draft.tokens))
            for i, draft in found.items()
        ]
        return choose_drafts(num_tokens, candidates, self._step_times.seconds, room)

    def _can_pay(self, num_tokens: int, num_drafts: int) -> bool:
        """Return whether drafts would pay if all of them were accepted, or need not."""
        if not self._config.adaptive:
            return True
        seconds = self._step_times.seconds
        rate = LEAST_GAIN * num_tokens / seconds(num_tokens)
        sizes = (1 << bit for bit in range(num_drafts.bit_length()))
        return any((num_tokens + size) / seconds(num_tokens, size) > rate for size in sizes)
