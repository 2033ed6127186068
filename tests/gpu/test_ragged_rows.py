"""Rows that drafted tokens: a slot gets several in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from gpu.executor import NO_COPIES, Copies, Finished, Submission
from gpu.runner import Runner
from gpu.sampling.drawn import Drawn
from gpu.slots import PlanError, Row, Slot, SlotTable
from tests.support.plans import GREEDY, PlanMaker
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import floats, ints


@attrs.define
class Drafting:
    """An executor whose tokens are positions, and that accepts all drafts but ``rejected``."""

    rejected: int = 0
    closed: list[int] = attrs.field(factory=list)

    @property
    def completions(self) -> None:
        return None

    def open(self, slot: Slot) -> None:
        pass

    def close(self, number: int) -> None:
        self.closed.append(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        sampling = [row for row in rows if row.samples]
        counts = np.array([1 + max(row.drafts - self.rejected, 0) for row in sampling])
        positions = [row.end + place for row, n in zip(sampling, counts, strict=True)
                     for place in range(n)]  # fmt: skip
        tokens = np.array(positions, dtype=np.int32)
        top = [(np.array([token]), np.array([-1.0], np.float32)) for token in tokens]
        named = [np.array([token / 2], dtype=np.float32) for token in tokens]
        logprobs = -tokens.astype(np.float32)
        drawn: Any = Drawn(tokens=tokens, counts=counts, logprobs=logprobs, top=top, named=named)
        return Finished(drawn)


@pytest.fixture
def executor() -> Drafting:
    return Drafting()


@pytest.fixture
def runner(executor: Drafting) -> Runner:
    slots = SlotTable(num_pages=64, page_size=4, max_model_len=64, vocab_size=100, max_row_tokens=4)
    return Runner(executor, slots, max_num_batched_tokens=16)


def test_a_slot_gets_all_tokens_of_its_row(runner: Runner, executor: Drafting) -> None:
    maker = PlanMaker(runner.step)
    maker.open(0, [9, 9, 9])
    maker.open(1, [8, 8])
    assert maker.step({0: 3, 1: 1}) == {0: [3], 1: []}
    assert maker.step({1: 1, 0: 4}) == {1: [2], 0: [4, 5, 6, 7]}
    slot = runner.slots[0]
    assert slot.tokens.tolist() == [9, 9, 9, 3, 4, 5, 6, 7]
    assert (slot.computed, slot.num_tokens) == (7, 8)
    executor.rejected = 2
    maker.slots[0].computed = 7
    assert maker.step({0: 4, 1: 2}) == {0: [8, 9], 1: [3]}
    assert (slot.computed, slot.num_tokens) == (9, 10)


def test_columns_are_those_of_the_tokens_that_were_taken(runner: Runner) -> None:
    maker = PlanMaker(runner.step)
    maker.open(0, [9, 9, 9], SamplerParams(stop_ids=[5]))
    maker.open(1, [8, 8])
    maker.step({0: 3, 1: 2})
    result = runner.step(maker.plan({0: 4, 1: 3}))
    # The stop id ends the first one's row.
    assert ints(result.offsets).tolist() == [0, 2, 5]
    assert ints(result.tokens).tolist() == [4, 5, 3, 4, 5]
    assert floats(result.logprobs).tolist() == [-4, -5, -3, -4, -5]
    assert ints(result.top_offsets).tolist() == [0, 1, 2, 3, 4, 5]
    assert ints(result.top_ids).tolist() == [4, 5, 3, 4, 5]
    assert floats(result.ids_logprobs).tolist() == [2, 2.5, 1.5, 2, 2.5]
    assert runner.slots[0].stopped
    assert runner.slots[0].num_tokens == 6
    result = runner.step(maker.plan({0: 1, 1: 1}))
    assert ints(result.offsets).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [(3, 5, "5 tokens but has 1"), (2, 4, "4 tokens but has 1"), (2, 3, "3 tokens but has 1")],
)
def test_only_a_decoding_row_drafts_and_only_so_much(
    runner: Runner, prompt: int, count: int, message: str
) -> None:
    maker = PlanMaker(runner.step)
    maker.open(0, [9, 9, 9], GREEDY)
    maker.step({0: prompt})
    with pytest.raises(PlanError, match=message):
        maker.step({0: count})


def test_drafts_count_as_tokens_of_the_plan(runner: Runner) -> None:
    maker = PlanMaker(runner.step)
    for number in range(5):
        maker.open(number, [9])
    maker.step(dict.fromkeys(range(5), 1))
    with pytest.raises(PlanError, match="20 tokens in one plan, over 16"):
        maker.step(dict.fromkeys(range(5), 4))
