"""One model, native and through transformers: ``python -m bench.engine.model_impl``.

The default model is written as a folder, and each of the two completes prompts of 128 tokens by 64,
with 1 and 8 streams at a time. The figures are processor time of the worker, which computes with
one thread, by tokens of output: what else the machine does meanwhile hardly matters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import trio

from bench.peers.model_files import write_folder
from bench.report import markdown, run_script
from bench.servers import MODEL
from trioserve import Engine, open_engine

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


async def measure(engine: Engine, num_streams: int, draw: random.Random) -> float:
    """Return milliseconds of the worker's processor time by token; streams begin together."""
    (worker,) = (each for each in psutil.Process().children() if "gpu" in each.cmdline())

    async def complete() -> None:
        prompt = draw.choices(range(100, 40_000), k=PROMPT_TOKENS)
        await engine.complete(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)

    began = sum(worker.cpu_times()[:2])
    async with trio.open_nursery() as nursery:
        for _ in range(num_streams):
            nursery.start_soon(complete)
    return 1000 * (sum(worker.cpu_times()[:2]) - began) / (num_streams * OUTPUT_TOKENS)


async def compare(options: argparse.Namespace) -> str:
    """Return a table of medians, after one turn that isn't counted."""
    lines = []
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(options.model, Path(place) / "model")
        # There the peers read that no token ends a text, by a number that isn't one.
        (folder / "generation_config.json").write_text("{}")
        for dtype in options.dtype:
            found = []
            for implementation in ("native", "transformers"):
                draw, how = random.Random(0), {"model_impl": implementation, "dtype": dtype}
                async with open_engine(str(folder), device="cpu", num_threads=1, **how) as engine:
                    await measure(engine, max(options.streams), draw)
                    found.append(
                        [
                            statistics.median(
                                [await measure(engine, count, draw) for _ in range(options.rounds)]
                            )
                            for count in options.streams
                        ]
                    )
            for count, own, other in zip(options.streams, *found, strict=True):
                lines.append([dtype, count, f"{own:.1f}", f"{other:.1f}", f"{own / other:.2f}"])
    heads = ["number format", "streams", "native, ms", "transformers, ms", "share"]
    return markdown(heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    options = {"dtype": ["float32", "bfloat16"], "streams": [1, 8], "rounds": 3}
    return run_script("model_impl", compare, arguments, model=MODEL, **options)


if __name__ == "__main__":
    sys.exit(main())
