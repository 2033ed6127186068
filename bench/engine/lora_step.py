"""Decode steps with adapters beside those without: ``python -m bench.engine.lora_step``.

The compiled kernels run steps of several rows of a model, whose rows have no adapter, one adapter
of all projections, or several in turn. Kinds of steps alternate, so that whatever else the machine
does meets all of them; the quickest quarter of each counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.engine.compiled_steps import CompiledSteps, load_compiled, num_pages_of, usual
from bench.report import markdown, run_script
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


def measure(options: argparse.Namespace) -> str:
    """Return a table with a line for each kind of step."""
    rows, context = options.rows, options.context
    each = num_pages_of(rows, context)
    room = {"num_pages": each * (len(KINDS) + 1), "max_rank": options.rank}
    how = {"quantization": options.quantization, "threads": options.threads}
    model = load_compiled(Path(locate(options.model)), **how, **room)
    before = CompiledSteps(model, rows=rows, context=context)
    for _ in range(options.rounds):
        before.run()
    for number in range(1, 5):
        model.adapters.put(number, random_adapter(model.config, options.rank, number))
    steps = {
        name: CompiledSteps(
            model, rows=rows, context=context, adapters=numbers, first_page=each * (place + 1)
        )
        for place, (name, numbers) in enumerate(KINDS.items())
    }
    for _ in range(options.rounds):
        for kind in steps.values():
            kind.run()
    plain = usual(steps["no adapter"].seconds)
    times = {
        name: usual(k.seconds) for name, k in {"no adapter is loaded": before, **steps}.items()
    }
    print(f"weights in {model.describe_weights()}, {rows} rows, rank {options.rank}")
    lines = [[name, f"{1e3 * time:.3f}", f"{time / plain:.3f}"] for name, time in times.items()]
    return markdown(["rows", "ms", "of no adapter"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    return run_script(
        *("lora_step", measure, arguments),
        **{"model": MODEL, "rows": 8, "rank": 16, "context": 200, "threads": 1},
        **{"quantization": "auto", "rounds": 200},
    )


if __name__ == "__main__":
    sys.exit(main())
