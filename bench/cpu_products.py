"""Matrix products on the CPU: each packed format beside torch's and oneDNN's, in one run.

``python -m bench.cpu_products`` goes through all products of the default model as one decode step
does: per layer queries, keys and values, attention's output, gate and up, down, and at the end the
head, each with weights of its own, so that they come from memory. In every round each variant has
its turn at every number of rows. Printed are the medians over the rounds, and the rates that follow
from them: of weights read (GB/s) and of arithmetic (GFLOP/s). The ratio is the median, over the
rounds, of oneDNN's time by the variant's own in the same round. What the memory can do is measured
in between, by the sum of a large tensor.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F

from bench.report import machine, markdown, own_versions, save
from gpu.cpu.products import Kind, Pool, Product, pack, packed_bytes
from gpu.models.linear import Linear

LAYER = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)
LAYERS = 30
READ_BYTES = 1 << 28

Step = Callable[[torch.Tensor, torch.Tensor], object]
"""Takes the inputs of 576 and of 1536 numbers, and computes every product once."""


@attrs.frozen(kw_only=True)
class Measurement:
    """One pass over all products: ``rows`` is 0 for a plain read of memory."""

    variant: str
    rows: int
    round: int
    seconds: float
    weight_bytes: int
    flops: float


def main() -> None:
    """Parse the command line, measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS), choices=list(_VARIANTS))
    parser.add_argument("--threads", type=int, default=machine()["cores"])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of the processor by the number of threads: for a machine that has other work",
    )
    parser.add_argument("--no-head", action="store_true", help="leave the head out")
    parser.add_argument("--save", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [*LAYER.values()] * options.layers + ([] if options.no_head else [HEAD])
    with Pool(options.threads) as pool, torch.inference_mode():
        variants = {
            name: _VARIANTS[name](list(_weights(shapes)), pool) for name in options.variants
        }
        measurements = list(_measure(variants, shapes, options))
    table = _table(measurements)
    print(table)
    facts = {
        "versions": own_versions(),
        "options": {name: value for name, value in vars(options).items() if name != "save"},
        "table": table,
    }
    print(save(options.save, "cpu-products", measurements, facts))


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


def _weights(shapes: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, generator=generator).mul_(0.05).bfloat16()


def _packed(kind: Kind) -> Callable[[list[torch.Tensor], Pool], tuple[Step, int]]:
    def variant(weights: list[torch.Tensor], pool: Pool) -> tuple[Step, int]:
        sizes = [packed_bytes(kind, *weight.shape) for weight in weights]
        places = _large_pages(sum(sizes)).split(sizes)
        products = [
            Product([pack(weight, kind, pool, place)])
            for weight, place in zip(weights, places, strict=True)
        ]
        for product, following in zip(products, products[1:] + products[:1], strict=True):
            product.precedes(following)
        # As in a decode step nothing is allocated: results and scratch are there beforehand.
        memory: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

        def step(narrow: torch.Tensor, wide: torch.Tensor) -> None:
            rows = len(narrow)
            if rows not in memory:
                memory.clear()
                out = torch.empty(rows * max(product.outputs for product in products)).bfloat16()
                scratch = max(
                    (product.scratch(rows, pool.threads) for product in products), key=len
                )
                memory[rows] = [
                    (out[: rows * product.outputs].view(rows, -1), scratch) for product in products
                ]
            for product, (out, scratch) in zip(products, memory[rows], strict=True):
                x = narrow if product.inputs == narrow.shape[1] else wide
                product.multiply(x, pool, out=out, scratch=scratch)

        return step, sum(product.nbytes for product in products)

    return variant


def _large_pages(size: int) -> torch.Tensor:
    """Memory as a model has it for its weights."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _torch(weights: list[torch.Tensor], pool: Pool) -> tuple[Step, int]:
    def step(narrow: torch.Tensor, wide: torch.Tensor) -> None:
        for weight in weights:
            F.linear(narrow if weight.shape[1] == narrow.shape[1] else wide, weight)

    return step, sum(weight.nbytes for weight in weights)


def _onednn(weights: list[torch.Tensor], pool: Pool) -> tuple[Step, int]:
    size = sum(weight.nbytes for weight in weights)
    products = [Linear(weight) for weight in weights]

    def step(narrow: torch.Tensor, wide: torch.Tensor) -> None:
        for product in products:
            product(narrow if product.in_features == narrow.shape[1] else wide)

    return step, size


_VARIANTS = {
    "onednn": _onednn,
    "torch": _torch,
    **{kind.name.lower(): _packed(kind) for kind in Kind},
}


def _measure(
    variants: dict[str, tuple[Step, int]],
    shapes: list[tuple[int, int]],
    options: argparse.Namespace,
) -> Iterator[Measurement]:

    def seconds_of(work: Callable[[], object]) -> float:
        clock = time.process_time if options.cpu_time else time.perf_counter
        began = clock()
        work()
        return (clock() - began) / (options.threads if options.cpu_time else 1)

    buffer = _large_pages(READ_BYTES).view(torch.int64).fill_(1)
    for rows in options.rows:
        inputs = torch.randn(rows, 576).bfloat16(), torch.randn(rows, 1536).bfloat16()
        flops = 2.0 * rows * sum(outputs * width for outputs, width in shapes)
        for step, _ in variants.values():
            step(*inputs)  # oneDNN compiles its products for this number of rows
        for number in range(options.rounds):
            seconds = seconds_of(buffer.sum)
            yield Measurement(
                variant="read", rows=0, round=number, seconds=seconds,
                weight_bytes=READ_BYTES, flops=0.0,
            )  # fmt: skip
            for name, (step, size) in variants.items():
                seconds = min(seconds_of(functools.partial(step, *inputs)) for _ in range(3))
                yield Measurement(
                    variant=name, rows=rows, round=number, seconds=seconds,
                    weight_bytes=size, flops=flops,
                )  # fmt: skip


def _table(measurements: list[Measurement]) -> str:
    reads = [m.weight_bytes / m.seconds / 1e9 for m in measurements if m.variant == "read"]
    lines = []
    for rows in sorted({m.rows for m in measurements} - {0}):
        of_rows = [m for m in measurements if m.rows == rows]
        for variant in dict.fromkeys(m.variant for m in of_rows):
            chosen = [m for m in of_rows if m.variant == variant]
            middle = statistics.median(m.seconds for m in chosen)
            rate = chosen[0].weight_bytes / middle / 1e9
            lines.append(
                [
                    *(str(rows), variant, f"{middle * 1e3:.2f}"),
                    f"{min(m.seconds for m in chosen) * 1e3:.2f}",
                    *(f"{rate:.1f}", f"{100 * rate / statistics.median(reads):.0f}"),
                    f"{chosen[0].flops / middle / 1e9:.0f}",
                    *(_ratio(of_rows, other, chosen) for other in ("onednn", "bf16")),
                ]
            )
    heads = ["rows", "variant", "ms", "best ms", "GB/s", "% of read", "GFLOP/s"]
    return (
        f"Memory read: median {statistics.median(reads):.1f} GB/s, best {max(reads):.1f}.\n\n"
        + markdown([*heads, "oneDNN / this", "bf16 / this"], lines)
    )


def _ratio(of_rows: list[Measurement], other: str, chosen: list[Measurement]) -> str:
    """The median, over the rounds, of the other variant's time by the chosen one's."""
    others = {m.round: m.seconds for m in of_rows if m.variant == other}
    if not others:
        return ""
    return f"{statistics.median(others[m.round] / m.seconds for m in chosen):.2f}"


if __name__ == "__main__":
    main()
