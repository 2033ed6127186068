"""The same model native and through transformers: what the fallback costs.

``python -m bench.model_impl`` writes the default model as a folder and has each of the two complete
prompts of 128 tokens by 64, with 1 and 8 streams at a time. The figures are processor time of the
worker, which computes with one thread, by tokens of output: what else the machine does meanwhile
hardly matters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import trio

from bench.hf_folder import write_folder
from trioserve import Engine, open_engine

__all__ = ["main", "measure"]

IMPLEMENTATIONS = ("native", "transformers")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


async def measure(engine: Engine, num_streams: int, draw: random.Random) -> float:
    """Milliseconds of the worker's processor time by token of output; streams begin together."""
    worker = _worker()

    async def complete() -> None:
        prompt = draw.choices(range(100, 40_000), k=PROMPT_TOKENS)
        await engine.complete(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)

    began = worker.cpu_times()
    async with trio.open_nursery() as nursery:
        for _ in range(num_streams):
            nursery.start_soon(complete)
    ended = worker.cpu_times()
    seconds = ended.user + ended.system - began.user - began.system
    return 1000 * seconds / (num_streams * OUTPUT_TOKENS)


def _worker() -> psutil.Process:
    """The only one that this process has."""
    (worker,) = (each for each in psutil.Process().children() if "gpu" in each.cmdline())
    return worker


async def measure_all(
    folder: Path, implementation: str, dtype: str, streams: Sequence[int], rounds: int
) -> list[float]:
    """The median of ``rounds`` for each number of streams, after one that isn't counted."""
    draw = random.Random(0)
    async with open_engine(
        str(folder), model_impl=implementation, dtype=dtype, device="cpu", num_threads=1
    ) as engine:
        await measure(engine, max(streams), draw)
        return [
            statistics.median([await measure(engine, count, draw) for _ in range(rounds)])
            for count in streams
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    print("| number format | streams | native, ms | transformers, ms | share |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(options.model, Path(place) / "model")
        # There the peers read that no token ends a text, by a number that isn't one.
        (folder / "generation_config.json").write_text("{}")
        for dtype in options.dtype:
            found = [
                trio.run(measure_all, folder, each, dtype, options.streams, options.rounds)
                for each in IMPLEMENTATIONS
            ]
            for count, own, other in zip(options.streams, *found, strict=True):
                print(f"| {dtype} | {count} | {own:.1f} | {other:.1f} | {own / other:.2f} |")


if __name__ == "__main__":
    main()
