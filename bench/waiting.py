"""How the compiled kernels' threads wait for one another: ``python -m bench.waiting``.

A thread that has done its share of a layer looks again and again whether the others have, a number
of times without a pause, and then lets other threads have its core in between. Here the server, the
client and the threads that compute share the cores, so who never lets go computes sooner where
nobody else wants the core, and holds up everybody where somebody does. Engines whose kernels were
compiled with other numbers take turns, each by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from bench.engine_load import answer_all, random_ids
from bench.report import markdown, show
from bench.servers import MODEL
from trioserve import Engine, open_engine

__all__ = ["Measurement", "compiled_with", "main", "measure", "table"]

SPINS = (0, 200, 2000, 20_000, 2_000_000_000)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
REQUESTS_PER_STREAM = 2


@attrs.frozen(kw_only=True)
class Measurement:
    """One engine under one load in one round. Times are in seconds."""

    spins: int
    streams: int
    round: int
    tokens_per_second: float
    gap_p50: float
    gap_p99: float


@contextlib.contextmanager
def compiled_with(spins: int, folder: Path) -> Iterator[None]:
    """Workers that start in the block wait so; their kernels are kept in ``folder``."""
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


async def measure(engine: Engine, *, spins: int, streams: int, round: int) -> Measurement:
    """One engine under one load.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(f"waiting {streams} {round}")
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(streams * REQUESTS_PER_STREAM)]
    run = await answer_all(engine, prompts, output=OUTPUT_TOKENS, at_a_time=streams)
    gaps = np.concatenate([np.diff(record.chunks) for record in run.records])
    return Measurement(
        spins=spins,
        streams=streams,
        round=round,
        tokens_per_second=len(prompts) * OUTPUT_TOKENS / run.duration,
        gap_p50=float(np.percentile(gaps, 50)),
        gap_p99=float(np.percentile(gaps, 99)),
    )


async def _run(options: argparse.Namespace, folder: Path) -> list[Measurement]:
    found: list[Measurement] = []
    for number in range(options.rounds):
        order = options.spins if number % 2 == 0 else reversed(options.spins)
        for spins in order:
            print(f"round {number + 1}: {spins} looks", flush=True)
            with compiled_with(spins, folder):
                async with open_engine(options.model) as engine:
                    await measure(engine, spins=spins, streams=1, round=-1)
                    for streams in options.streams:
                        found.append(
                            await measure(engine, spins=spins, streams=streams, round=number)
                        )
    return found


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: medians over the rounds."""
    heads = ("looks without a pause", "streams", "tokens/s", "gap p50 · p99 ms")
    lines = []
    for streams, spins in sorted({(m.streams, m.spins) for m in measurements}):
        own = [m for m in measurements if (m.streams, m.spins) == (streams, spins)]
        p50 = statistics.median(m.gap_p50 for m in own) * 1e3
        p99 = statistics.median(m.gap_p99 for m in own) * 1e3
        rate = statistics.median(m.tokens_per_second for m in own)
        lines.append((f"{spins:,}", str(streams), f"{rate:.1f}", f"{p50:.1f} · {p99:.1f}"))
    return markdown(heads, lines)


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.waiting", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--spins", type=int, nargs="+", default=list(SPINS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="trioserve-waiting-") as folder:
        measurements = trio.run(_run, options, Path(folder))
    show(table(measurements), options.save, "waiting", measurements)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
