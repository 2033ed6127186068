"""Steps with adapters over kernels: tokens are those of the merged models, but for near-ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.cuda.adapters import CudaAdapters
from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels import KernelLoader
from gpu.lora.adapter_slots import AdapterSlots, product_shapes
from gpu.lora.reading import read_adapter
from gpu.lora.torch_adapters import TorchAdapters
from tests.kernels.memory import place, relative_error
from tests.kernels.serving import Judge, Server
from tests.support.lora_adapters import make_adapter, merge, rows_of
from tests.support.plans import GREEDY
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model

PROMPTS = [[(7 * i * i + 3 * i + 11 * k) % 300 for i in range(20 + 9 * k)] for k in range(4)]
MARGIN = 0.2
"""The margin of a draw: merged weights are rounded to bfloat16 once more than the model's."""


@pytest.mark.parametrize("graphs", [False, True])
def test_a_batch_of_several_adapters_and_none(
    loader: KernelLoader, graphs: bool, tmp_path: Path
) -> None:
    """Three adapters, of which two have room on the device."""
    model = make_tiny("llama3", tmp_path / "model", head_dim=64)
    adapters = [
        make_adapter(model, tmp_path / f"adapter-{seed}", seed=seed, rank=3 * seed, alpha=2 * seed)
        for seed in (1, 2, 3)
    ]
    judges = [Judge(model)]
    judges += [Judge(merge(model, path, tmp_path / f"{path.name}-merged")) for path in adapters]
    server = Server.of(model, loader, graphs=graphs, adapters=adapters)
    maker, launches = server.maker, server.loader.launches
    for slot in (0, 1, 2):
        maker.open(slot, PROMPTS[slot], adapter=slot)
    maker.step({0: 20, 1: 13, 2: 38})
    maker.step({0: 1, 1: 16, 2: 1})
    before = launches.copy()
    for _ in range(4):
        maker.step({0: 1, 1: 1, 2: 1})
    assert (launches == before) == graphs
    before = launches.copy()
    maker.step({0: 1})  # none of its rows has an adapter
    assert (launches == before) == graphs
    assert launches["lora_expand"] == before["lora_expand"]
    maker.open(3, PROMPTS[3], adapter=3)
    maker.step({0: 1, 2: 1, 3: 47})
    before = launches.copy()
    for _ in range(4):
        maker.step({2: 1, 3: 1})
        maker.step({1: 1, 3: 1})
    assert (launches == before) == graphs
    near_ties = total = 0
    for slot, prompt in enumerate(PROMPTS):
        tokens = maker.slots[slot].tokens
        near_ties += judges[slot].check(tokens, len(prompt), GREEDY, margin=MARGIN)
        total += len(tokens) - len(prompt)
    assert total > 25
    assert near_ties <= total // 6


@pytest.mark.parametrize("count", [1, 19])
def test_every_product_is_updated_as_by_torch(
    loader: KernelLoader, count: int, tmp_path: Path
) -> None:
    model = make_tiny("qwen3", tmp_path / "model")
    config = open_model(model).config
    adapter_slots = AdapterSlots(config, 24, torch.bfloat16, loader.device, count=3)
    reference = TorchAdapters(config, 24, torch.float32)
    for number, parts in ((1, {}), (2, {"parts": ("self_attn.v_proj", "mlp.up_proj")})):
        folder = make_adapter(model, tmp_path / str(number), seed=number, rank=11 * number, **parts)
        for store in (adapter_slots.store, reference.store):
            store.put(number, read_adapter(folder, config, 24))
    rows = rows_of([0, 2, 1, 2], count)
    buffer = StepBuffer(loader.device, CudaAdapters.regions(4 * count, adapter_slots.count))
    adapters = CudaAdapters(loader, buffer, adapter_slots, config)
    adapters.pack(rows)
    buffer.upload()
    groups = reference.groups(rows)
    for layer in range(config.num_layers):
        for index, (product, shape) in enumerate(product_shapes(config).items()):
            generator = torch.Generator().manual_seed(10 * layer + index)
            x = torch.randn(4 * count, shape.inputs, generator=generator).bfloat16()
            y = torch.randn(4 * count, sum(shape.outputs), generator=generator).bfloat16()
            wanted = y.float()
            for group in groups:
                group.update(layer, product, x.float(), wanted)
            found = place(y, loader)
            adapters.update(layer, product, place(x, loader), found)
            assert relative_error(found, wanted) < 6e-3
            assert torch.equal(found[:count].cpu(), y[:count])
