"""Steps with adapters over kernels: tokens are those of the merged models, but for near-ties."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.kernels import KernelLoader
from tests.kernels.serving import Judge, Server
from tests.lora.adapters import make_adapter, merge
from tests.plans import GREEDY
from tests.tiny_models import make_tiny

PROMPTS = [[(7 * i * i + 3 * i + 11 * k) % 300 for i in range(20 + 9 * k)] for k in range(4)]
MARGIN = 0.2
"""Of the merged weights, each is rounded to bfloat16 once more than the model's."""


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
    maker = server.maker
    for slot in (0, 1, 2):
        maker.open(slot, PROMPTS[slot], adapter=slot)
    maker.step({0: 20, 1: 13, 2: 38})
    maker.step({0: 1, 1: 16, 2: 1})
    for _ in range(4):
        maker.step({0: 1, 1: 1, 2: 1})
    before = server.loader.num_launches
    maker.step({0: 1})  # nobody in it has an adapter
    assert (server.loader.num_launches == before) == graphs
    maker.open(3, PROMPTS[3], adapter=3)
    maker.step({0: 1, 2: 1, 3: 47})
    for _ in range(4):
        maker.step({2: 1, 3: 1})
        maker.step({1: 1, 3: 1})
    near_ties = total = 0
    for slot, prompt in enumerate(PROMPTS):
        tokens = maker.slots[slot].tokens
        near_ties += judges[slot].check(tokens, len(prompt), GREEDY, margin=MARGIN)
        total += len(tokens) - len(prompt)
    assert total > 25
    assert near_ties <= total // 6
