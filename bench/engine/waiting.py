"""Ways for the kernels' threads to wait for one another: ``python -m bench.engine.waiting``.

A thread that has done its share of a layer looks again and again whether the others have, a number
of times without a pause (``--spins``), and then lets other threads have its core in between. Here
the client and the threads that compute share the cores. Engines whose kernels were compiled with
other numbers take turns, each by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.engine import answer_all, random_ids
from bench.report import Rounds, markdown, percentile, run_script
from bench.servers import MODEL
from trioserve import Engine, open_engine

PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS_PER_STREAM = 128, 128, 2


@contextlib.contextmanager
def compiled_with(spins: int, folder: Path) -> Iterator[None]:
    """Have workers that start in the block wait so; their kernels are kept in ``folder``."""
    compiler = folder / f"compiler-{spins}"
    given = shutil.which(os.environ.get("CXX", "g++")) or "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(given)} -DTRIOSERVE_SPINS={spins} "$@"\n')
    compiler.chmod(0o755)
    before = {name: os.environ.get(name) for name in ("CXX", "XDG_CACHE_HOME")}
    os.environ |= {"CXX": str(compiler), "XDG_CACHE_HOME": str(folder / f"cache-{spins}")}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


async def measure(engine: Engine, streams: int, round: int) -> dict[str, float]:
    """Return the rate and the gaps of one engine under one load."""
    rng = random.Random(f"waiting {streams} {round}")
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(streams * REQUESTS_PER_STREAM)]
    run = await answer_all(engine, prompts, output=OUTPUT_TOKENS, at_a_time=streams)
    gaps = 1e3 * np.concatenate([np.diff(record.chunks) for record in run.records])
    rate = len(prompts) * OUTPUT_TOKENS / run.duration
    return {"rate": rate, "p50": percentile(gaps, 50), "p99": percentile(gaps, 99)}


async def compare(options: argparse.Namespace) -> str:
    """Return a table of medians over the rounds."""
    rounds = Rounds()
    with tempfile.TemporaryDirectory(prefix="trioserve-waiting-") as folder:
        for number in range(options.rounds):
            for spins in options.spins if number % 2 == 0 else reversed(options.spins):
                print(f"round {number + 1}: {spins} looks", flush=True)
                with compiled_with(spins, Path(folder)):
                    async with open_engine(options.model) as engine:
                        await measure(engine, 1, -1)
                        for streams in options.streams:
                            found = await measure(engine, streams, number)
                            rounds.add((streams, spins), **found)
    lines = [
        [f"{spins:,}", streams, f"{of['rate']:.1f}", f"{of['p50']:.1f} · {of['p99']:.1f}"]
        for (streams, spins), of in sorted(rounds.medians().items())
    ]
    return markdown(["looks without a pause", "streams", "tokens/s", "gap p50 · p99 ms"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    spins = [0, 200, 2000, 20_000, 2_000_000_000]
    options = {"model": MODEL, "spins": spins, "streams": [1, 8, 32], "rounds": 3}
    return run_script("waiting", compare, arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
