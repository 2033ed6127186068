"""Matrix products of one step beside oneDNN's: ``python -m bench.engine.products``.

All products of the default model are computed once for so many rows, each with weights of its own,
so that they come from memory. oneDNN has its weights packed, as torch does it. Formats take turns.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence

import attrs
import torch

from bench.report import Made, Rounds, Verdict, in_turns, machine, markdown, script
from gpu.cpu.isa import ISAS
from gpu.cpu.library import prefer
from gpu.cpu.products import Kind, PackedProduct, Pool, pack

SHAPES = [*[(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30, (49152, 576)]
Step = Callable[[torch.Tensor, torch.Tensor], None]
"""Computes all products of inputs with 576 and with 1,536 numbers."""


def packed_step(weights: Sequence[torch.Tensor], kind: Kind, pool: Pool, most: int) -> Step:
    """Return a step of the compiled kernels for up to ``most`` rows."""
    products = [PackedProduct([pack(weight, kind, pool)]) for weight in weights]
    for one, following in itertools.pairwise(products):
        one.precedes(following)
    scratch = max((each.scratch(most, pool.threads) for each in products), key=len)
    out = torch.empty(most * 49152, dtype=torch.bfloat16)

    def step(narrow: torch.Tensor, wide: torch.Tensor) -> None:
        for each in products:
            x = narrow if each.inputs == narrow.shape[1] else wide
            result = out[: len(x) * each.outputs].view(len(x), -1)
            each.multiply(x, pool, out=result, scratch=scratch)

    return step


def onednn_step(weights: Sequence[torch.Tensor]) -> Step:
    """Return a step of oneDNN."""
    ops = torch.ops.mkldnn
    packed = [ops._reorder_linear_weight(weight) for weight in weights]

    def step(narrow: torch.Tensor, wide: torch.Tensor) -> None:
        for weight in packed:
            x = narrow if weight.shape[1] == narrow.shape[1] else wide
            ops._linear_pointwise(x, weight, None, "none", [], "")

    return step


@script
def measure(*, rows: Sequence[int] = (1, 8, 32, 128, 512), rounds: int = 7) -> Made:
    """Return a table of rates in GFLOP/s, and of bf16's by oneDNN's."""
    prefer(ISAS.get(os.environ.get("TRIOSERVE_CPU_ISA", "auto")))
    threads, found = machine()["cores"], Rounds()
    torch.set_num_threads(threads)
    weights = [torch.randn(shape).mul_(0.05).bfloat16() for shape in SHAPES]
    work = 2e-9 * sum(outputs * inputs for outputs, inputs in SHAPES)
    with Pool(threads) as pool, torch.inference_mode():
        kinds = {kind.name.lower(): packed_step(weights, kind, pool, max(rows)) for kind in Kind}
        steps = {"oneDNN bf16": onednn_step(weights), **kinds}
        for _, (count, name) in in_turns(rounds, list(itertools.product(rows, steps))):
            inputs = torch.randn(count, 576).bfloat16(), torch.randn(count, 1536).bfloat16()
            steps[name](*inputs)  # oneDNN compiles for each number of rows
            began = time.perf_counter()
            steps[name](*inputs)
            found.add((count, name), rate=count * work / (time.perf_counter() - began))
    rates, lines, verdicts = found.medians(), [], []
    for count in rows:
        ratio = found.ratio((count, "bf16"), (count, "oneDNN bf16"), "rate")
        each = (f"{rates[count, name]['rate']:.0f}" for name in steps)
        lines.append([count, *each, f"{ratio:.2f}"])
        what, bound = f"bf16 products, {count} rows", 1.2 if count <= 32 else 0.9
        one = Verdict(what=what, against="oneDNN bf16", bound=bound, reached=ratio, rounds=rounds)
        verdicts.append(attrs.asdict(one))
    whole = torch.cat([weight.flatten() for weight in weights]).view(torch.int64)
    for _ in range(rounds):
        began = time.perf_counter()
        whole.sum()
        found.add("read", rate=8e-9 * len(whole) / (time.perf_counter() - began))
    # A product with one row takes two operations for each weight of two bytes.
    read, own = found.medians()["read"]["rate"], rates[rows[0], "bf16"]["rate"] / rows[0]
    note = f"One row reads the weights in bf16 at {own:.0f} GB/s; a sum of them reads {read:.0f}."
    heads = ["rows", *(f"{name}, GFLOP/s" for name in steps), "bf16 / oneDNN"]
    # oneDNN computes with all that the processor has; a slower instruction set is no match for it.
    facts = {} if os.environ.get("TRIOSERVE_CPU_ISA") else {"verdicts": verdicts}
    return Made(f"{markdown(heads, lines)}\n\n{note}", facts)
