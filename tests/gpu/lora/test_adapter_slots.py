"""The adapters in a device's slots: the last used ones, and only those that are loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.kernels.lora import ENTRY
from gpu.lora.adapter_slots import AdapterSlots, PackedAdapter, product_shapes
from gpu.lora.reading import read_adapter
from gpu.lora.torch_adapters import TorchAdapters
from gpu.weights.packed_modules import PACKED_MODULES
from tests.support.lora_adapters import make_adapter, rows_of
from tests.support.tiny_models import make_tiny
from trioserve.model_files import ModelConfig, open_model

MAX_RANK = 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("llama2", tmp_path / "model")


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return open_model(model).config


@pytest.fixture
def adapter_slots(model: Path, config: ModelConfig, tmp_path: Path) -> AdapterSlots:
    held = AdapterSlots(config, MAX_RANK, torch.bfloat16, torch.device("cpu"), count=2)
    for number in range(1, 5):
        folder = make_adapter(model, tmp_path / str(number), seed=number, rank=number)
        held.store.put(number, read_adapter(folder, config, MAX_RANK))
    return held


def holds(adapter_slots: AdapterSlots, slot: int, number: int) -> bool:
    """Return whether the slot has the adapter's numbers and entries."""
    adapter = adapter_slots.store[number]
    numbers = adapter_slots.numbers[slot, : adapter.numbers.numel()]
    return torch.equal(numbers, adapter.numbers) and torch.equal(
        adapter_slots.entries[slot], adapter.entries
    )


def test_the_last_used_stay(adapter_slots: AdapterSlots) -> None:
    def bring(*numbers: int) -> list[int]:
        found = adapter_slots.bring(numbers)
        assert all(map(holds, [adapter_slots] * len(found), found, numbers))
        return found

    one, two = bring(1, 2)
    assert {one, two} == {0, 1}
    assert bring() == []
    assert bring(2) == [two]
    assert bring(3, 2) == [one, two]  # 1 makes way, though 2 came before 3
    assert bring(2, 1) == [two, one]
    adapter_slots.store.unload(2)
    assert bring(3) == [two]  # in the slot of the unloaded one
    assert bring(1, 3) == [one, two]


def test_where_the_matrices_lie(config: ModelConfig, model: Path, tmp_path: Path) -> None:
    folder = make_adapter(
        model,
        tmp_path / "some",
        parts=("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"),
        rank=3,
        alpha=6,
        ranks={"self_attn.v_proj": 17},
    )
    adapter = read_adapter(folder, config, 32)
    placed = PackedAdapter.of(adapter, config, torch.bfloat16, torch.device("cpu"))
    entries = placed.entries.numpy().view(ENTRY).reshape(config.num_layers, len(PACKED_MODULES))
    ranks = [[int(entry[f"rank{part}"]) for part in range(3)] for entry in entries[1]]
    assert ranks == [[16, 0, 32], [0, 0, 0], [0, 0, 0], [16, 0, 0]]
    inputs, (queries, _, values) = (
        product_shapes(config)["qkv"].inputs,
        product_shapes(config)["qkv"].outputs,
    )
    entry = entries[1, 0]
    a = placed.numbers[entry["a"] : entry["b"]].view(48, inputs).float().numpy()
    q, v = adapter.updates[1, "self_attn.q_proj"], adapter.updates[1, "self_attn.v_proj"]
    np.testing.assert_allclose(a[:3], q.a, rtol=1e-2)
    np.testing.assert_allclose(a[16:33], v.a, rtol=1e-2)
    assert not a[3:16].any()
    assert not a[33:].any()
    end = entry["b"] + 16 * queries
    b = placed.numbers[entry["b"] : end].view(queries, 16).float().numpy()
    np.testing.assert_allclose(b[:, :3], 2 * q.b, rtol=1e-2)
    assert not b[:, 3:].any()
    b = placed.numbers[end : end + 32 * values].view(values, 32).float().numpy()
    np.testing.assert_allclose(b[:, :17], 6 / 17 * v.b, rtol=1e-2)
    assert placed.numbers.numel() == sum(
        int(own[f"rank{part}"]) * (shape.inputs + outputs)
        for layer in entries
        for own, shape in zip(layer, product_shapes(config).values(), strict=True)
        for part, outputs in enumerate(shape.outputs)
    )


def test_the_tokens_of_each(model: Path, config: ModelConfig, tmp_path: Path) -> None:
    reference = TorchAdapters(config, MAX_RANK, torch.float32)
    for number in (1, 2):
        folder = make_adapter(model, tmp_path / f"{number}", seed=number)
        reference.store.put(number, read_adapter(folder, config, MAX_RANK))
    groups = reference.groups(rows_of([2, 0, 1, 2]))
    assert [group.tokens.tolist() for group in groups] == [[0, 1, 6, 7], [4, 5]]


def test_what_a_device_has_to_have_room_for(config: ModelConfig) -> None:
    # Two layers: q and o 64 x 64, k and v 32 x 64, gate and up 96 x 64, down 64 x 96; rank 8, which
    # is filled up to 16. Queries, keys and values have the most sums between the two kernels.
    numbers = 2 * (2 * 128 + 2 * 96 + 3 * 160) * 16
    entries = 2 * 4 * 32
    between = 100 * 3 * 16 * 4
    found = AdapterSlots.device_bytes(config, MAX_RANK, torch.bfloat16, 2, max_tokens=100)
    assert found == 2 * (2 * numbers + entries) + between
    held = AdapterSlots(config, MAX_RANK, torch.bfloat16, torch.device("meta"), count=2)
    assert held.numbers.nbytes + held.entries.nbytes + between == found
    assert AdapterSlots.device_bytes(config, 0, torch.bfloat16, 2, max_tokens=100) == 0


def test_a_gpu_copies_by_itself(
    model: Path, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From other memory the host waits until all steps that are queued have ended."""
    page_locked: list[torch.Tensor] = []
    copied: list[tuple[int, bool]] = []
    copy = torch.Tensor.copy_

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        page_locked.append(tensor)
        return tensor

    def noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append((source.data_ptr(), non_blocking))
        return copy(self, source, non_blocking)

    adapter = read_adapter(make_adapter(model, tmp_path / "one", seed=1), config, MAX_RANK)
    adapter_slots = AdapterSlots(config, MAX_RANK, torch.bfloat16, torch.device("cpu"), count=1)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    placed = PackedAdapter.of(adapter, config, torch.bfloat16, torch.device("cuda"))
    assert [each.data_ptr() for each in page_locked] == [
        placed.numbers.data_ptr(),
        placed.entries.data_ptr(),
    ]
    adapter_slots.store.put(1, adapter)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    adapter_slots.bring([1])
    stored = adapter_slots.store[1]
    assert copied == [(stored.numbers.data_ptr(), True), (stored.entries.data_ptr(), True)]
