"""The time to the first token with prompt adapters: ``python -m tests.engine.virtual_tokens``.

Prompts are computed without an adapter, and behind the virtual tokens of adapters, which the prefix
cache has. The virtual tokens of some adapters fill whole pages of 16, and those of others don't.
Each prompt is asked for in all ways, one after the other, in an order that changes. The worker has
one thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.report import Made, Rounds, in_turns, markdown, script
from bench.servers import MODEL
from tests.engine.kv_tiers import first_token, prompts_of
from tests.support.prompt_adapters import write_prompt_adapter
from trioserve import Engine, open_engine

_WIDTH = 576
"""The model's hidden size."""
_GOAL = 1.1
"""Most time with an adapter, in multiples of that without."""


@asynccontextmanager
async def open_with_adapters(counts: Sequence[int]) -> AsyncIterator[Engine]:
    """Open an engine with an adapter of each number of virtual tokens; its name is the number."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        made = {
            count: write_prompt_adapter(Path(folder) / str(count), count=count, width=_WIDTH)
            for count in counts
        }
        modules = [f"{count}={path}" for count, path in made.items()]
        async with open_engine(MODEL, **options, lora_modules=modules) as engine:
            yield engine


def _prompt(length: int, number: int) -> list[int]:
    """Return prompt ``number`` of that length; no two have a beginning in common."""
    return prompts_of([length], 10_000 * number + length)[length][:length]


@script
async def measure(
    lengths: tuple[int, ...] = (16, 64, 256, 1024),
    virtual: tuple[int, ...] = (20, 60, 64),
    rounds: int = 20,
) -> Made:
    """Return a line for each length of a prompt."""
    found, counts = Rounds(), (0, *virtual)
    async with open_with_adapters(virtual) as engine:
        for count in counts:
            await first_token(engine, _prompt(64, -1 - count), str(count or ""))
        for number, (length, count) in in_turns(
            rounds, [(length, count) for length in lengths for count in counts]
        ):
            prompt = _prompt(length, number)
            took, cached = await first_token(engine, prompt, str(count or ""))
            assert not cached
            found.add((length, count), ms=took)
    medians, lines, worst = found.medians(), [], 0.0
    for length in lengths:
        ratios = [found.ratio((length, count), (length, 0), "ms") for count in virtual]
        times = [f"{medians[length, count]['ms']:.1f}" for count in counts]
        lines.append([length, *times, *(f"{ratio:.2f}" for ratio in ratios)])
        worst = max(worst, *ratios)
    heads = ["tokens of the prompt", "no adapter, ms"]
    heads += [f"{count} virtual tokens, ms" for count in virtual]
    heads += [f"{count} to none" for count in virtual]
    return Made(markdown(heads, lines), {"worst": worst, "goal": _GOAL}, int(worst > _GOAL))
