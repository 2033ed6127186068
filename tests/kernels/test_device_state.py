"""The device's block tables and tokens become what the host's are, in pairs or in whole rows."""

from __future__ import annotations

import pytest

from gpu.cuda import state as device_state
from gpu.cuda.state import DeviceState
from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels import KernelLoader
from gpu.slots import PlanError, Row, SlotTable
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

NUM_SLOTS = 4


class Both:
    """Slots on the host, and the device's state that follows them."""

    def __init__(self, loader: KernelLoader) -> None:
        self.slots = SlotTable(num_pages=99, page_size=16, max_model_len=300, vocab_size=1000)
        self.buffer = StepBuffer(loader.device, DeviceState.regions())
        self.state = DeviceState(
            loader, self.buffer, num_slots=NUM_SLOTS, max_model_len=300, page_size=16
        )

    def open(self, number: int, tokens: list[int], pages: list[int]) -> None:
        opened = OpenSlot(
            slot=number,
            generation=1,
            tokens=from_ints(tokens),
            prompt_length=len(tokens),
            computed=0,
            pages=from_ints(pages),
            sampler=SamplerParams(),
        )
        self.slots.apply(Plan(number=1, opened=[opened]))
        self.state.open(self.slots[number])

    def append(self, number: int, page: int) -> None:
        self.slots.apply(Plan(number=1, page_slots=from_ints([number]), page_ids=from_ints([page])))

    def step(self, *numbers: int) -> None:
        rows = [Row(slot=self.slots[n], start=0, count=1, samples=False) for n in numbers]
        self.state.pack(rows, self.slots)
        self.buffer.upload()
        self.state.copy_large()
        self.state.scatter()

    def check(self, number: int) -> None:
        slot = self.slots[number]
        table = self.slots.block_tables[number, : slot.num_pages]
        assert self.state.block_tables[number, : slot.num_pages].tolist() == table.tolist()
        history = self.state.history[number, : len(slot.tokens)]
        assert history.tolist() == slot.tokens.tolist()


@pytest.fixture
def both(loader: KernelLoader) -> Both:
    return Both(loader)


def test_slots_that_are_opened_and_grow(both: Both) -> None:
    both.open(2, [5, 6, 7], [9])
    both.open(0, list(range(40)), [3, 4])
    both.step(2, 0)
    for number in (2, 0):
        both.check(number)
    both.append(0, 71)
    both.append(2, 72)
    both.step(0)
    both.check(0)
    both.step(2)
    both.check(2)


def test_what_the_sampler_appended_stays(both: Both) -> None:
    both.open(1, [5, 6], [9])
    both.step(1)
    both.state.history[1, 2] = 44
    both.append(1, 10)
    both.step(1)
    assert both.state.history[1, :3].tolist() == [5, 6, 44]


def test_a_slot_that_is_opened_again_before_any_step(both: Both) -> None:
    both.open(3, [1] * 20, [8, 9])
    both.slots.apply(Plan(number=1, closed=from_ints([3])))
    both.open(3, [2, 3], [10])
    both.step(3)
    both.check(3)


def test_a_block_table_that_is_cut_and_grows_again(both: Both) -> None:
    both.open(1, [5] * 40, [9, 10, 11])
    both.step(1)
    both.slots.apply(Plan(number=1, cuts=from_ints([1, 1])))
    both.step(1)
    for page in (20, 21):
        both.append(1, page)
    both.step(1)
    both.check(1)
    both.slots.apply(Plan(number=1, cuts=from_ints([1, 2])))
    for page in (30, 31):
        both.append(1, page)
    both.step(1)
    both.check(1)


def test_more_than_fits_is_copied_row_by_row(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "MAX_UPDATES", 30)
    both.open(0, list(range(25)), [1, 2])
    both.open(1, list(range(100, 400)), list(range(19)))
    both.open(2, [7], [5])
    both.step(0, 1, 2)
    for number in (0, 1, 2):
        both.check(number)
    assert both.buffer["num_updates"].tolist() == [25 + 1 + 2 + 1]


def test_a_slot_past_the_last_is_refused(both: Both) -> None:
    with pytest.raises(PlanError, match="slot 4 is one of 4") as caught:
        both.open(NUM_SLOTS, [1], [2])
    assert caught.value.slot == NUM_SLOTS


def test_rows_begin_where_four_numbers_can_be_read_at_once(both: Both) -> None:
    assert both.state.history.shape == (NUM_SLOTS, 304)
    assert both.state.block_tables.shape == (NUM_SLOTS, 20)
    assert both.state.history.is_contiguous()


def test_more_tokens_than_an_int32_can_number_are_refused(loader: KernelLoader) -> None:
    buffer = StepBuffer(loader.device, DeviceState.regions())
    with pytest.raises(ValueError, match=r"5000 sequences .* of 1000000 tokens"):
        DeviceState(loader, buffer, num_slots=5000, max_model_len=1_000_000, page_size=16)
