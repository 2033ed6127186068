"""The runner over kernels gives the tokens of the reference, whatever a plan makes of a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.kernels import KernelLoader
from tests.kernels.serving import Judge, Server
from tests.plans import GREEDY
from tests.tiny_models import make_tiny
from trioserve.sampling import SamplerParams

MODELS = {
    "llama": ("llama3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}),
    "mistral": ("mistral", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
                            "sliding_window": 24}),
}  # fmt: skip
MARGIN = 0.1

PROMPTS = [
    [(7 * i * i + 3 * i + 11 * k) % 300 for i in range(n)] for k, n in enumerate((41, 5, 17, 66))
]


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = MODELS[request.param]
    return make_tiny(family, tmp_path_factory.mktemp(request.param), **changes)


def test_chunks_and_mixed_batches(folder: Path, loader: KernelLoader) -> None:
    server, judge = Server.of(folder, loader), Judge(folder)
    maker = server.maker
    maker.open(0, PROMPTS[0])
    maker.step({0: 20})
    maker.open(1, PROMPTS[1])
    maker.step({0: 7, 1: 5})
    maker.open(2, PROMPTS[2])
    maker.step({1: 1, 0: 1, 2: 3})
    maker.step({1: 1, 0: 13, 2: 14})
    for _ in range(6):
        maker.step({0: 1, 1: 1, 2: 1})
    for slot in (0, 1, 2):
        ties = judge.check(maker.slots[slot].tokens, len(PROMPTS[slot]), GREEDY, margin=MARGIN)
        assert ties <= 1
