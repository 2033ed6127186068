"""One part of the engine in each script, in this process: ``python -m bench.engine.NAME``."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trioserve import Engine
from trioserve.load import EmbeddedTarget, Figures, Run, closed_loop, figures_of


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return ``count`` token ids of plain text."""
    return [rng.randrange(100, 250) for _ in range(count)]


async def answer_all(
    engine: Engine, prompts: Sequence[list[int]], *, output: int, at_a_time: int = 1
) -> Run:
    """Have ``output`` tokens generated for each prompt; raise if a request fails."""
    asked = {"max_tokens": output, "temperature": 0.0, "ignore_eos": True}
    bodies = [{"prompt": prompt, **asked} for prompt in prompts]
    run = await closed_loop(EmbeddedTarget(engine=engine), bodies, at_a_time)
    if failed := [record.error for record in run.records if record.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return run


async def measure_streams(
    engine: Engine, streams: int, seed: object, *, prompt: int, output: int, requests: int
) -> Figures:
    """Return the figures of a closed loop, so many requests of each stream; prompts are new."""
    rng = random.Random(f"{streams} {seed}")
    prompts = [random_ids(rng, prompt) for _ in range(streams * requests)]
    return figures_of(await answer_all(engine, prompts, output=output, at_a_time=streams))
