"""A draft model's cache: what it reads behind each token are that sequence's own tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cpu.draft_model import CpuDraftModel
from gpu.sampling.drafting.draft_model import DraftModelSource
from gpu.sampling.drafting.sources import AskedDraft, DraftKind
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row, Slot, SlotTable
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

PAGE_SIZE = 4
NUM_PAGES = 64
VOCAB = 50


class PagesOfTokens:
    """A model whose pages hold tokens. Its most probable token is a function of all before it."""

    adapters = None

    def __init__(self) -> None:
        self.pages = np.full((NUM_PAGES, PAGE_SIZE), -1)
        self.num_computed = 0

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        for source, destination in copies.tolist():
            self.pages[destination] = self.pages[source]

    def forward(self, rows: Sequence[Row], slots: SlotTable) -> tuple[Any, Any]:
        contexts = []
        for row in rows:
            for position in range(row.start, row.stop):
                page = slots.block_tables[row.slot.number, position // PAGE_SIZE]
                self.pages[page, position % PAGE_SIZE] = row.slot.token(position)
                self.num_computed += 1
            table = slots.block_tables[row.slot.number, : row.slot.num_pages]
            context = self.pages[table].ravel()[: row.stop].tolist()
            assert context == row.slot.span(0, row.stop).tolist(), "keys of other tokens are read"
            contexts.append(context)
        return contexts, np.arange(len(rows))

    def floats(self, hidden: Any) -> Any:
        raise AssertionError

    def logits(self, hidden: Any, rows: Any = None) -> Any:
        raise AssertionError

    def most_probable(self, hidden: Any, rows: Any) -> npt.NDArray[np.int32]:
        return np.array([next_token(hidden[row]) for row in rows.tolist()], dtype=np.int32)


def next_token(context: Sequence[int]) -> int:
    return (sum(context) * 7 + len(context)) % VOCAB


class Stage:
    """Slots as plans leave them, with a draft model beside them."""

    def __init__(self, max_tokens: int = 64, vocab_size: int = VOCAB) -> None:
        self.slots = SlotTable(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_model_len=NUM_PAGES * PAGE_SIZE,
            vocab_size=VOCAB,
            max_row_tokens=8,
        )
        self.model = PagesOfTokens()
        self.drafts = DraftModelSource(
            CpuDraftModel(self.model, self.slots),
            self.slots,
            vocab_size=vocab_size,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_tokens=max_tokens,
            step_times=StepTimes({1: 1.0}),
        )

    def open(
        self,
        number: int,
        tokens: Sequence[int],
        pages: Sequence[int],
        computed: int = 0,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Slot:
        """Open a slot as a step does that copies pages."""
        opened = OpenSlot(
            slot=number,
            generation=0,
            tokens=from_ints(tokens),
            prompt_length=1,
            computed=computed,
            pages=from_ints(pages),
            sampler=SamplerParams(),
        )
        self.slots.apply(Plan(number=1, opened=[opened]))
        self.drafts.open(self.slots[number])
        if copies:
            self.drafts.copy_pages(np.array(copies, dtype=np.int32))
        self.drafts.note_pages([])
        return self.slots[number]

    def close(self, number: int) -> None:
        self.slots.apply(Plan(number=1, closed=from_ints([number])))
        self.drafts.close(number)

    def look_up(self, slot: Slot, most: int) -> list[int]:
        row = Row(slot=slot, start=slot.num_tokens - 1, count=1, samples=True)
        self.drafts.note_pages([row])
        found = self.drafts.look_up({7: AskedDraft(slot, most)})
        assert all(draft.kind is DraftKind.MODEL for draft in found.values())
        return found[7].tokens if found else []


def following(tokens: Sequence[int], count: int) -> list[int]:
    context = list(tokens)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(tokens) :]


def append(slot: Slot, tokens: Sequence[int]) -> None:
    for token in tokens:
        slot.settle(slot.extend(), token)


def test_drafts_are_the_models_next_tokens_whatever_was_accepted() -> None:
    draw = random.Random(1)
    stage = Stage()
    tokens = [3, 1, 4, 1, 5]
    slot = stage.open(0, tokens, range(20))
    for _ in range(12):
        most = draw.randint(1, 6)
        drafts = stage.look_up(slot, most)
        assert drafts == following(slot.tokens.tolist(), most)
        accepted = drafts[: draw.randint(0, most)]
        # A token of its own follows the accepted ones.
        append(slot, [*accepted, (following([*slot.tokens.tolist(), *accepted], 1)[0] + 1) % VOCAB])
    # All that was accepted was computed once, with each draft but the last of its step.
    assert stage.model.num_computed < 2.5 * slot.num_tokens


def test_a_shared_prefix_is_computed_once() -> None:
    stage = Stage()
    prefix = list(range(8))
    first = stage.open(0, [*prefix, 9], [0, 1, 2])
    stage.look_up(first, 1)
    before = stage.model.num_computed
    second = stage.open(1, [*prefix, 10, 11], [0, 1, 3], computed=8)
    assert stage.look_up(second, 2) == following([*prefix, 10, 11], 2)
    assert stage.model.num_computed == before + 3


def test_a_page_that_was_given_away_counts_as_new() -> None:
    stage = Stage()
    first = stage.open(0, list(range(9)), [0, 1, 2])
    stage.look_up(first, 1)
    stage.close(0)
    # The other model computed page 0 for another sequence; no drafts were asked for.
    stage.open(0, [9] * 9, [0, 1, 2])
    stage.close(0)
    again = stage.open(0, [9] * 8 + [1], [0, 1, 3], computed=8)
    assert stage.look_up(again, 3) == following([9] * 8 + [1], 3)


def test_a_page_that_a_sequence_gets_later_counts_as_new() -> None:
    stage = Stage()
    first = stage.open(0, list(range(9)), [0, 1, 2])
    stage.look_up(first, 1)
    stage.close(0)
    slot = stage.open(0, [9, 9, 9], [5])
    stage.slots.apply(Plan(number=1, page_slots=from_ints([0]), page_ids=from_ints([0])))
    append(slot, [8] * 5)
    stage.drafts.note_pages([Row(slot=slot, start=7, count=1, samples=True)])
    stage.close(0)
    again = stage.open(0, [9, 9, 9, 8, 8, 8, 8, 8, 1], [5, 0, 3], computed=8)
    assert stage.look_up(again, 2) == following(again.tokens.tolist(), 2)


def test_copied_pages_are_as_ready_as_their_sources() -> None:
    stage = Stage()
    tokens = list(range(9))
    stage.look_up(stage.open(0, tokens, [0, 1, 2]), 1)
    before = stage.model.num_computed
    moved = stage.open(1, tokens, [40, 41, 3], computed=8, copies=[(0, 40), (1, 41)])
    assert stage.look_up(moved, 1) == following(tokens, 1)
    assert stage.model.num_computed == before + 1


def test_a_long_prompt_is_caught_up_with_in_pieces() -> None:
    stage = Stage(max_tokens=10)
    tokens = [1] * 25
    slot = stage.open(0, tokens, range(10))
    assert [stage.look_up(slot, 2) for _ in range(3)] == [[], [], following(tokens, 2)]


def test_a_page_is_as_ready_as_what_the_opening_step_copies_there() -> None:
    stage = Stage()
    other = stage.open(0, [9] * 5, [1, 2])
    stage.look_up(other, 1)
    # Page 1 has keys of other tokens until page 40 is copied there, which has none.
    tokens = [7] * 5
    slot = stage.open(1, tokens, [1, 3], computed=4, copies=[(40, 1)])
    assert stage.look_up(slot, 2) == following(tokens, 2)


def test_a_sequence_with_a_token_of_one_model_only_has_no_drafts() -> None:
    stage = Stage(vocab_size=VOCAB - 10)
    slot = stage.open(0, [1, 1, 1], range(9))
    assert stage.look_up(slot, 1) == following([1, 1, 1], 1)
    computed = stage.model.num_computed
    append(slot, [VOCAB - 10])
    assert stage.look_up(slot, 6) == []
    assert stage.model.num_computed == computed


def test_a_draft_of_one_model_only_ends_the_drafts() -> None:
    tokens = next(
        [first, 0]
        for first in range(VOCAB)
        if next_token([first, 0]) < 40 <= next_token([first, 0, next_token([first, 0])])
    )
    stage = Stage(vocab_size=40)
    slot = stage.open(0, tokens, range(9))
    assert stage.look_up(slot, 6) == following(tokens, 1)
