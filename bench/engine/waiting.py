"""Ways for the kernels' threads to wait for one another: ``python -m bench.engine.waiting``.

A thread that has done its share of a layer looks again and again whether the others have, a number
of times without a pause (``--spins``), and then lets other threads have its core in between. Here
the client and the threads that compute share the cores. Engines whose kernels were compiled with
other numbers take turns, each by itself.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from bench.engine import measure_streams
from bench.report import Rounds, in_turns, markdown, script
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
    chosen = {"CXX": str(compiler), "XDG_CACHE_HOME": str(folder / f"cache-{spins}")}
    with mock.patch.dict(os.environ, chosen):
        yield


async def measure(engine: Engine, streams: int, round: int) -> dict[str, float]:
    """Return the rate and the gaps of one engine under one load."""
    lengths = {"prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS, "requests": REQUESTS_PER_STREAM}
    figures = await measure_streams(engine, streams, round, **lengths)
    gaps = figures.itl_ms
    return {"rate": figures.output_tokens_per_second, "p50": gaps.p50, "p99": gaps.p99}


@script
async def compare(
    *,
    model: str = MODEL,
    spins: Sequence[int] = (0, 200, 2000, 20_000, 2_000_000_000),
    streams: Sequence[int] = (1, 8, 32),
    rounds: int = 3,
) -> str:
    """Return a table of medians over the rounds."""
    found = Rounds()
    with tempfile.TemporaryDirectory(prefix="trioserve-waiting-") as folder:
        for number, looks in in_turns(rounds, spins):
            with compiled_with(looks, Path(folder)):
                async with open_engine(model) as engine:
                    await measure(engine, 1, -1)
                    for width in streams:
                        found.add((width, looks), **await measure(engine, width, number))
    lines = [
        [f"{looks:,}", width, f"{of['rate']:.1f}", f"{of['p50']:.1f} · {of['p99']:.1f}"]
        for (width, looks), of in sorted(found.medians().items())
    ]
    return markdown(["looks without a pause", "streams", "tokens/s", "gap p50 · p99 ms"], lines)
