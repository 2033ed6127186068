"""Mixtures of experts over kernels: eager steps, judged as in tests/kernels/test_whole_model.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.kernels import KernelLoader
from tests.kernels.serving import Judge, Server
from tests.kernels.test_whole_model import PROMPTS, SEEDED, check
from tests.support.lora_adapters import make_adapter
from tests.support.plans import GREEDY
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams

MARGIN = 0.25
"""More than without experts: where rounding changes a choice among them, logits move further."""


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_chunks_and_mixed_batches(
    family: str, params: SamplerParams, loader: KernelLoader, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, head_dim=64, norm_topk_prob=True)
    server = Server.of(folder, loader)
    maker = server.maker
    maker.open(0, PROMPTS[0], params)
    maker.step({0: 20})
    maker.open(1, PROMPTS[1], params)
    maker.step({0: 20, 1: 5})
    maker.step({1: 1, 0: 1})
    for _ in range(4):
        maker.step({0: 1, 1: 1})
    assert [len(maker.slots[slot].tokens) for slot in (0, 1)] == [46, 11]
    check(Judge(folder), server, {0: 41, 1: 5}, params, margin=MARGIN)


def test_adapters_of_attention(loader: KernelLoader, tmp_path: Path) -> None:
    """Check that a row with an adapter gets other tokens, and the one beside it the same."""
    folder = make_tiny("mixtral", tmp_path / "model", head_dim=64)
    adapter = make_adapter(folder, tmp_path / "adapter", seed=1, rank=16)
    server = Server.of(folder, loader, adapters=[adapter])
    maker = server.maker
    maker.open(0, PROMPTS[1])
    maker.open(1, PROMPTS[1], adapter=1)
    maker.step({0: 5, 1: 5})
    for _ in range(5):
        maker.step({0: 1, 1: 1})
    plain, adapted = (maker.slots[slot].tokens for slot in (0, 1))
    assert plain != adapted
    check(Judge(folder), server, {0: 5}, margin=MARGIN)
