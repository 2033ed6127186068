"""The same model native and through transformers, side by side: what the fallback costs.

``python -m bench.model_impl`` writes the default model as a folder and gives each of the two the
same prompts of 128 tokens, of which each stream has 64 more computed, with 1 and 8 streams at a
time. The two take turns, ``--rounds`` times; the figures are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from bench.hf_folder import write_folder
from trioserve import Engine, open_engine

__all__ = ["main", "measure"]

IMPLEMENTATIONS = ("native", "transformers")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


async def measure(engine: Engine, num_streams: int, draw: random.Random) -> float:
    """Tokens of output per second, of streams that begin together."""
    prompts = [draw.choices(range(100, 40_000), k=PROMPT_TOKENS) for _ in range(num_streams)]

    async def complete(prompt: list[int]) -> None:
        await engine.complete(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(complete, prompt)
    return num_streams * OUTPUT_TOKENS / (time.perf_counter() - began)


async def compare(folder: Path, dtype: str, streams: Sequence[int], rounds: int) -> None:
    """Print a table of both, which are loaded at the same time and compute by turns."""
    found: dict[tuple[str, int], list[float]] = {}
    draw = random.Random(0)
    async with (
        open_engine(str(folder), model_impl="native", dtype=dtype, device="cpu") as native,
        open_engine(str(folder), model_impl="transformers", dtype=dtype, device="cpu") as through,
    ):
        engines = dict(zip(IMPLEMENTATIONS, (native, through), strict=True))
        for engine in engines.values():
            await measure(engine, max(streams), draw)
        for _ in range(rounds):
            for count in streams:
                for name, engine in engines.items():
                    found.setdefault((name, count), []).append(await measure(engine, count, draw))
    print(f"| {dtype}, streams | native | transformers | share |\n| --- | --- | --- | --- |")
    for count in streams:
        own, others = (statistics.median(found[name, count]) for name in IMPLEMENTATIONS)
        print(f"| {count} | {own:.0f} tokens/s | {others:.0f} tokens/s | {others / own:.2f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(options.model, Path(place) / "model")
        # There the peers read that no token ends a text, by a number that isn't one.
        (folder / "generation_config.json").write_text("{}")
        for dtype in options.dtype:
            trio.run(compare, folder, dtype, options.streams, options.rounds)


if __name__ == "__main__":
    main()
