"""What drawing a step's tokens costs on the CPU: the compiled sampler against the torch sampler.

``python -m bench.cpu_sampler``. Milliseconds a step, the best of many rounds, in which the two take
turns on the same logits. These are normal numbers with fifty high ones in every row, as a model's
are; ``flat`` ones have none, and then top_p has most of the vocabulary to look at.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from bench.report import markdown, own_versions, save
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuSampler, Floats
from gpu.cpu.sampling import CompiledSampler
from gpu.cpu.torch_model import TorchSampler
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from trioserve.protocol.sampling import SamplerParams

__all__ = ["CASES", "Measurement", "main", "measure"]

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_p, flat": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
    },
    "logprobs": {"temperature": 0.8, "logprobs": 5},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "logprobs": 5,
    },
}
VOCABULARIES = (49_152, 151_936)
NUM_TOKENS = 400
"""Of a row's sequence, which penalties look at."""


@attrs.frozen(kw_only=True)
class Measurement:
    """One case. Times are in seconds a step; a speed-up is torch's by that of the compiled one."""

    case: str
    vocab_size: int
    rows: int
    torch: float
    compiled: float
    differing: int
    """Tokens that the two didn't have in common, over all rounds."""

    @property
    def speed_up(self) -> float:
        return self.torch / self.compiled


def logits_of(rows: int, vocab_size: int, *, flat: bool) -> Floats:
    """[rows, vocab_size] float32."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, vocab_size), dtype=np.float32) * 2.5
    for row in () if flat else x:
        row[rng.integers(0, vocab_size, 50)] += np.linspace(12, 4, 50, dtype=np.float32)
    return x


def measure(
    case: str, vocab_size: int, rows: int, samplers: tuple[CpuSampler, CpuSampler], rounds: int
) -> Measurement:
    """``samplers``: torch's and the compiled one."""
    logits = logits_of(rows, vocab_size, flat=case.endswith("flat"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, NUM_TOKENS).astype(np.int32)
    best = [float("inf"), float("inf")]
    differing = 0
    for number in range(rounds):
        asked = [
            SamplerRow(SamplerParams(seed=number * rows + i, **CASES[case]), tokens, 100)
            for i in range(rows)
        ]
        drawn = []
        for which, sampler in enumerate(samplers):
            own = logits.copy()  # torch's overwrites it
            started = time.perf_counter()
            sampled = sampler.sample(own, asked)
            best[which] = min(best[which], time.perf_counter() - started)
            drawn.append(sampled.tokens)
        differing += int((drawn[0] != drawn[1]).sum())
    return Measurement(
        case=case,
        vocab_size=vocab_size,
        rows=rows,
        torch=best[0],
        compiled=best[1],
        differing=differing,
    )


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown."""
    heads = ("sampling", "vocabulary", "rows", "torch ms", "compiled ms", "ratio", "µs a row")
    return markdown(
        heads,
        [
            (
                m.case,
                f"{m.vocab_size:,}",
                str(m.rows),
                f"{m.torch * 1e3:.2f}",
                f"{m.compiled * 1e3:.2f}",
                f"{m.speed_up:.1f}",
                f"{m.compiled / m.rows * 1e6:.0f}",
            )
            for m in measurements
        ],
    )


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked; 1 if the samplers drew different tokens."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_sampler", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    measurements = []
    for vocab_size in options.vocabularies:
        samplers = (
            TorchSampler(Sampler(vocab_size, "cpu")),
            CompiledSampler(load_library(), vocab_size, options.threads),
        )
        measurements += [
            measure(case, vocab_size, rows, samplers, options.rounds)
            for case in options.cases
            for rows in options.rows
        ]
    print(table(measurements))
    if options.save:
        facts = {"versions": own_versions(), "threads": options.threads}
        print(save(options.save, "cpu-sampler", measurements, facts))
    return 1 if any(m.differing for m in measurements) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
