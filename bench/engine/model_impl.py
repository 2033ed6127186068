"""One model, native and through transformers: ``python -m bench.engine.model_impl``.

The default model is written as a folder, and each of the two completes prompts of 128 tokens by 64,
with 1 and 8 streams at a time. The figures are processor time of the worker, which computes with
one thread, by tokens of output: what else the machine does meanwhile hardly matters.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.engine import measure_streams
from bench.peers.model_files import write_folder
from bench.report import Rounds, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


async def measure(engine: Engine, num_streams: int, seed: int) -> float:
    """Return milliseconds of the worker's processor time by token; streams begin together."""
    (worker,) = (each for each in psutil.Process().children() if "gpu" in each.cmdline())
    began = sum(worker.cpu_times()[:2])
    lengths = {"prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS, "requests": 1}
    await measure_streams(engine, num_streams, seed, **lengths)
    return 1000 * (sum(worker.cpu_times()[:2]) - began) / (num_streams * OUTPUT_TOKENS)


@script
async def compare(
    *,
    model: str = MODEL,
    dtype: Sequence[str] = ("float32", "bfloat16"),
    streams: Sequence[int] = (1, 8),
    rounds: int = 3,
) -> str:
    """Return a table of medians, after one turn that isn't counted."""
    found = Rounds()
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(model, Path(place) / "model")
        # There the peers read that no token ends a text, by a number that isn't one.
        (folder / "generation_config.json").write_text("{}")
        for format, way in itertools.product(dtype, ("native", "transformers")):
            how = {"model_impl": way, "dtype": format}
            async with open_engine(str(folder), device="cpu", num_threads=1, **how) as engine:
                await measure(engine, max(streams), -1)
                for count, number in itertools.product(streams, range(rounds)):
                    found.add((format, count), **{way: await measure(engine, count, number)})
    lines = []
    for case, of in found.medians().items():
        own, other = of["native"], of["transformers"]
        lines.append([*case, f"{own:.1f}", f"{other:.1f}", f"{own / other:.2f}"])
    heads = ["number format", "streams", "native, ms", "transformers, ms", "share"]
    return markdown(heads, lines)
