"""Decode steps with adapters beside those without: ``python -m bench.lora_step``.

The compiled kernels run steps of several rows of a model, whose rows have no adapter, one adapter
of all projections, or several in turn. Kinds of steps alternate, so that whatever else the machine
does meets all of them; the quickest quarter of each counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bench.compiled_steps import CompiledSteps, load_compiled, num_pages_of, usual
from gpu.lora.reading import Adapter, Update
from gpu.weights import expected_tensors
from gpu.weights.packed_modules import PACKED_MODULES
from trioserve.model_files import ModelConfig, locate


def random_adapter(config: ModelConfig, rank: int, seed: int) -> Adapter:
    """An adapter of all projections, with small random numbers."""
    draw = np.random.default_rng(seed)
    shapes = expected_tensors(config)
    updates = {}
    for layer in range(config.num_layers):
        for part in (part for parts in PACKED_MODULES.values() for part in parts):
            outputs, inputs = shapes[f"model.layers.{layer}.{part}.weight"]
            a = draw.standard_normal((rank, inputs), dtype=np.float32) / 100
            b = draw.standard_normal((outputs, rank), dtype=np.float32) / 100
            updates[layer, part] = Update(a, b, 1.0)
    return Adapter(updates=updates, checksum="")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.lora_step", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()

    kinds: dict[str, list[int]] = {
        "no adapter": [0],
        "1 adapter": [1],
        "4 adapters": [1, 2, 3, 4],
        "1 adapter, half of the rows": [0, 1],
    }
    each = num_pages_of(options.rows, options.context)
    model = load_compiled(
        Path(locate(options.model)),
        quantization=options.quantization,
        threads=options.threads,
        num_pages=each * (len(kinds) + 1),
        max_rank=options.rank,
    )
    before = CompiledSteps(model, rows=options.rows, context=options.context)
    for _ in range(options.rounds):
        before.run()
    for number in range(1, 5):
        model.adapters.put(number, random_adapter(model.config, options.rank, number))
    steps = {
        name: CompiledSteps(
            model,
            rows=options.rows,
            context=options.context,
            adapters=numbers,
            first_page=each * (place + 1),
        )
        for place, (name, numbers) in enumerate(kinds.items())
    }
    for _ in range(options.rounds):
        for kind in steps.values():
            kind.run()
    plain = usual(steps["no adapter"].seconds)
    print(f"weights in {model.describe_weights()}, {options.rows} rows, rank {options.rank}")
    for name, kind in {"no adapter is loaded": before, **steps}.items():
        seconds = usual(kind.seconds)
        print(f"{name:30} {seconds * 1e3:8.3f} ms {seconds / plain:7.3f}")


if __name__ == "__main__":
    main()
