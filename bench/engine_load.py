"""Requests to an engine in this process, of prompts that are random ids of the default model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trioserve import Engine
from trioserve.load import EmbeddedTarget, Run, closed_loop

__all__ = ["answer_all", "random_ids"]


def random_ids(rng: random.Random, count: int) -> list[int]:
    """``count`` token ids that stand for plain text."""
    return [rng.randrange(100, 250) for _ in range(count)]


async def answer_all(
    engine: Engine, prompts: Sequence[list[int]], *, output: int, at_a_time: int = 1
) -> Run:
    """Have ``output`` tokens generated for each prompt.

    Raises:
        RuntimeError: a request failed.
    """
    bodies = [
        {"prompt": prompt, "max_tokens": output, "temperature": 0.0, "ignore_eos": True}
        for prompt in prompts
    ]
    run = await closed_loop(EmbeddedTarget(engine=engine), bodies, at_a_time)
    failed = [record.error for record in run.records if record.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return run
