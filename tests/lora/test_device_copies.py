"""Which adapters have copies on a device: the last used ones, and only those that are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.lora.reading import read_adapter
from gpu.lora.torch_adapters import TorchAdapter, TorchAdapters
from gpu.slots import Row, SlotTable
from tests.lora.adapters import make_adapter
from tests.plans import GREEDY
from tests.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.wire import OpenSlot, Plan, from_ints


def rows_of(adapters: TorchAdapters, numbers: list[int]) -> list[Row]:
    """Rows of two tokens each."""
    slots = SlotTable(num_pages=64, page_size=4, max_model_len=64, vocab_size=300)
    slots.adapters = adapters.store
    opened = [
        OpenSlot(
            slot=slot,
            generation=1,
            tokens=from_ints([5, 6]),
            prompt_length=2,
            computed=0,
            pages=from_ints([slot]),
            sampler=GREEDY,
            adapter=number,
        )
        for slot, number in enumerate(numbers)
    ]
    places, twos = from_ints(range(len(numbers))), from_ints([2] * len(numbers))
    return slots.apply(Plan(number=1, opened=opened, row_slots=places, row_counts=twos))


@pytest.fixture
def adapters(tmp_path: Path) -> TorchAdapters:
    model = make_tiny("llama2", tmp_path / "model")
    config = open_model(model).config
    # Tensors of this device have shapes and no numbers, and it isn't the CPU.
    held = TorchAdapters(config, 8, torch.bfloat16, torch.device("meta"), most=2)
    for number in range(1, 5):
        folder = make_adapter(model, tmp_path / str(number), seed=number)
        held.store.put(number, read_adapter(folder, config, 8))
    return held


def copies(adapters: TorchAdapters, numbers: list[int]) -> dict[int, TorchAdapter]:
    groups = adapters.groups(rows_of(adapters, numbers))
    return dict(zip(dict.fromkeys(filter(None, numbers)), (g.adapter for g in groups), strict=True))


def test_the_last_used_stay(adapters: TorchAdapters) -> None:
    assert adapters.groups(rows_of(adapters, [0, 0])) == []
    first = copies(adapters, [1, 0, 2, 1])
    assert copies(adapters, [2]) == {2: first[2]}
    second = copies(adapters, [3, 2])  # 1 makes way, though 2 is older
    assert second[2] is first[2]
    third = copies(adapters, [1, 2])
    assert third[2] is first[2]
    assert third[1] is not first[1]
    adapters.store.unload(2)
    fourth = copies(adapters, [3])  # in the place of what nobody knows any more
    assert copies(adapters, [1, 3]) == {1: third[1], 3: fourth[3]}
    assert all(
        tensor.device.type == "meta"
        for updates in fourth[3].updates.values()
        for update in updates
        for tensor in (update.a, update.b)
    )


def test_the_tokens_of_each(adapters: TorchAdapters) -> None:
    cpu = TorchAdapters(adapters._config, 8, torch.float32, torch.device("cpu"), most=0)
    cpu.store._adapters.update(adapters.store._adapters)
    groups = cpu.groups(rows_of(cpu, [2, 0, 1, 2]))
    assert [group.tokens.tolist() for group in groups] == [[0, 1, 6, 7], [4, 5]]


def test_what_a_device_has_to_have_room_for(adapters: TorchAdapters) -> None:
    # Two layers: q and o 64 x 64, k and v 32 x 64, gate and up 96 x 64, down 64 x 96; rank 8.
    numbers = 2 * (2 * 128 + 2 * 96 + 3 * 160) * 8
    per_token = 8 + 160
    assert adapters.device_bytes(100) == 2 * (2 * numbers + 100 * per_token)
    none = TorchAdapters(adapters._config, 0, torch.bfloat16, torch.device("meta"), most=2)
    assert none.device_bytes(100) == 0
