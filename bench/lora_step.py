"""Decode steps with adapters beside those without: ``python -m bench.lora_step``.

The compiled kernels run steps of several rows of a model, whose rows have no adapter, one adapter
of all projections, or several in turn. Kinds of steps alternate, so that whatever else the machine
does meets all of them; the quickest quarter of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpu.cpu.compiled import CompiledModel, read_as
from gpu.cpu.library import load_library
from gpu.lora.products import PRODUCTS
from gpu.lora.reading import Adapter, Update
from gpu.rope import cos_sin_table
from gpu.slots import SlotTable
from gpu.weights import expected_tensors, read_weights
from trioserve.model_files import ModelConfig, locate, open_model
from trioserve.sampling import SamplerParams
from trioserve.wire import OpenSlot, Plan, from_ints

PAGE_SIZE = 16


def random_adapter(config: ModelConfig, rank: int, seed: int) -> Adapter:
    """An adapter of all projections, with small random numbers."""
    draw = np.random.default_rng(seed)
    shapes = expected_tensors(config)
    updates = {}
    for layer in range(config.num_layers):
        for part in (part for parts in PRODUCTS.values() for part in parts):
            outputs, inputs = shapes[f"model.layers.{layer}.{part}.weight"]
            a = draw.standard_normal((rank, inputs), dtype=np.float32) / 100
            b = draw.standard_normal((outputs, rank), dtype=np.float32) / 100
            updates[layer, part] = Update(a, b, 1.0)
    return Adapter(updates=updates, checksum="")


class Steps:
    """Decode steps of ``count`` rows whose adapters are ``numbers`` in turn."""

    def __init__(
        self, model: CompiledModel, numbers: Sequence[int], count: int, context: int, first: int
    ) -> None:
        self._model = model
        self._slots = SlotTable(
            num_pages=1 << 20, page_size=PAGE_SIZE, max_model_len=2048, vocab_size=1 << 20
        )
        self._slots.adapters = range(1, 1000)
        each = -(-(context + 1) // PAGE_SIZE)
        opened = [
            OpenSlot(
                slot=row,
                generation=1,
                tokens=from_ints([7] * (context + 1)),
                prompt_length=context + 1,
                computed=context,
                pages=from_ints(range(first + row * each, first + (row + 1) * each)),
                sampler=SamplerParams(temperature=0.0),
                adapter=numbers[row % len(numbers)],
            )
            for row in range(count)
        ]
        ones = from_ints([1] * count)
        plan = Plan(number=1, opened=opened, row_slots=from_ints(range(count)), row_counts=ones)
        self._rows = self._slots.apply(plan)
        self.pages = count * each
        self.seconds: list[float] = []

    def run(self) -> None:
        """One step, the same every time: layers and the most probable tokens."""
        began = time.perf_counter()
        hidden, ends = self._model.forward(self._rows, self._slots)
        self._model.most_probable(hidden, ends)
        self.seconds.append(time.perf_counter() - began)

    @property
    def usual(self) -> float:
        """The mean of the quickest quarter, in seconds."""
        quickest = sorted(self.seconds)[: max(len(self.seconds) // 4, 1)]
        return sum(quickest) / len(quickest)


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

    files = open_model(Path(locate(options.model)))
    model = CompiledModel(
        load_library(),
        files.config,
        options.quantization,
        options.threads,
        max_rank=options.rank,
    )
    dtype, keep = read_as(options.quantization)
    model.load(read_weights(files, dtype, lambda done, total: None, keep))
    kinds: dict[str, list[int]] = {
        "no adapter": [0],
        "1 adapter": [1],
        "4 adapters": [1, 2, 3, 4],
        "1 adapter, half of the rows": [0, 1],
    }
    each = -(-(options.context + 1) // PAGE_SIZE) * options.rows
    model.finish(
        cos_sin_table(files.config, 2048, 2048),
        page_size=PAGE_SIZE,
        num_pages=each * (len(kinds) + 1),
        max_tokens=256,
    )
    before = Steps(model, [0], options.rows, options.context, 0)
    for _ in range(options.rounds):
        before.run()
    for number in range(1, 5):
        model.adapters.put(number, random_adapter(files.config, options.rank, number))
    steps = {
        name: Steps(model, numbers, options.rows, options.context, each * (place + 1))
        for place, (name, numbers) in enumerate(kinds.items())
    }
    for _ in range(options.rounds):
        for kind in steps.values():
            kind.run()
    plain = steps["no adapter"].usual
    print(f"weights in {model.describe_weights()}, {options.rows} rows, rank {options.rank}")
    print(f"{'no adapter is loaded':30} {before.usual * 1e3:8.3f} ms {before.usual / plain:7.3f}")
    for name, kind in steps.items():
        print(f"{name:30} {kind.usual * 1e3:8.3f} ms {kind.usual / plain:7.3f}")


if __name__ == "__main__":
    main()
