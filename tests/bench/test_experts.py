"""What the benchmark of experts measures, and what its table says."""

from __future__ import annotations

import pytest

from bench.experts import MODELS, Measurement, measure, table
from gpu.cpu.library import BuildError, load_library

try:
    load_library()
except BuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

_TINY = {
    **{"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64},
    **{"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32},
}
_WAYS = {"bf16", "int8", "grouped_mm", "eager"}


@pytest.mark.parametrize("name", MODELS)
def test_every_way_computes_every_step(name: str) -> None:
    steps = {"two": (2, 1), "prompt": (1, 20)}
    found = measure(name, _TINY, threads=1, seconds=0, steps=steps)
    assert {(m.step, m.way) for m in found} == {(step, way) for step in steps for way in _WAYS}
    assert all(m.seconds > 0 and m.model == name for m in found)


def test_the_table_compares_with_the_quicker_of_transformers_ways() -> None:
    seconds = {"bf16": 0.002, "int8": 0.001, "grouped_mm": 0.006, "eager": 0.007}
    rows = table(
        [Measurement(model="m", step="s", way=way, seconds=each) for way, each in seconds.items()]
    )
    assert rows.splitlines()[-1] == "| m | s | 2.0 | 1.0 | 6.0 | 7.0 | 3.00 |"
