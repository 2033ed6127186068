"""Decode steps with adapters beside those without: ``python -m bench.engine.lora_step``.

The compiled kernels run steps of several rows of a model, whose rows have no adapter, one adapter
of all projections, or several in turn. Kinds of steps alternate, so that whatever else the machine
does meets all of them; the quickest quarter of each counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.engine.compiled_steps import CompiledSteps, load_compiled, num_pages_of, timed_in_turns
from bench.report import markdown, script
from bench.servers import MODEL
from gpu.lora.reading import LoraWeights, LowRankUpdate
from gpu.weights.expected import expected_tensors
from gpu.weights.packed_modules import PACKED_MODULES
from trioserve.model_files import ModelConfig, locate

KINDS = {
    "no adapter": [0],
    "1 adapter": [1],
    "4 adapters": [1, 2, 3, 4],
    "1 adapter, half of the rows": [0, 1],
}


def random_adapter(config: ModelConfig, rank: int, seed: int) -> LoraWeights:
    """Return an adapter of all projections, with small random numbers."""
    draw = np.random.default_rng(seed)
    shapes = expected_tensors(config)
    updates = {}
    for layer in range(config.num_layers):
        for part in (part for parts in PACKED_MODULES.values() for part in parts):
            outputs, inputs = shapes[f"model.layers.{layer}.{part}.weight"]
            a = draw.standard_normal((rank, inputs), dtype=np.float32) / 100
            b = draw.standard_normal((outputs, rank), dtype=np.float32) / 100
            updates[layer, part] = LowRankUpdate(a, b, 1.0)
    return LoraWeights(updates=updates, checksum="")


@script
def measure(
    *,
    model: str = MODEL,
    rows: int = 8,
    rank: int = 16,
    context: int = 200,
    threads: int = 1,
    quantization: str = "auto",
    rounds: int = 200,
) -> str:
    """Return a table with a line for each kind of step."""
    each = num_pages_of(rows, context)
    room = {"num_pages": each * (len(KINDS) + 1), "max_rank": rank}
    path, how = Path(locate(model)), {"quantization": quantization, "threads": threads}
    loaded = load_compiled(path, **how, **room)
    before = CompiledSteps(loaded, rows=rows, context=context)
    times = timed_in_turns({"no adapter is loaded": before.run}, rounds=rounds)
    for number in range(1, 5):
        loaded.adapters.put(number, random_adapter(loaded.config, rank, number))
    steps = {}
    for place, (name, numbers) in enumerate(KINDS.items(), 1):
        how = {"adapters": numbers, "first_page": each * place}
        steps[name] = CompiledSteps(loaded, rows=rows, context=context, **how).run
    times |= timed_in_turns(steps, rounds=rounds)
    print(f"weights in {loaded.describe_weights()}, {rows} rows, rank {rank}")
    plain = times["no adapter"]
    lines = [[name, f"{1e3 * time:.3f}", f"{time / plain:.3f}"] for name, time in times.items()]
    return markdown(["rows", "ms", "of no adapter"], lines)
