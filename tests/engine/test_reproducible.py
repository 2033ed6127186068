"""A seeded request gives the same tokens whatever shares its batch, and if it is preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import Engine

PROMPTS = [
    [3 + (number * 7 + place) % 290 for place in range(5 + 9 * number)] for number in range(10)
]
SAMPLING: dict[str, Any] = {
    "max_tokens": 60,
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


async def complete(engine: Engine, number: int) -> tuple[int, ...]:
    completion = await engine.complete(PROMPTS[number], seed=number, **SAMPLING)
    return completion.token_ids


async def complete_together(engine: Engine) -> list[tuple[int, ...]]:
    results: dict[int, tuple[int, ...]] = {}

    async def run(number: int) -> None:
        results[number] = await complete(engine, number)

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(run, number)
    return [results[number] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("depth", [1, 2])
async def test_alone_together_in_chunks_and_preempted(tiny: Path, depth: int) -> None:
    async with open_tiny_engine(tiny, enable_prefix_caching=False) as engine:
        alone = [await complete(engine, number) for number in range(len(PROMPTS))]
    assert len(set(alone)) == len(PROMPTS)
    # Room for little more than one of the longest, so that any two that overlap have to preempt.
    tight = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 32}
    async with open_tiny_engine(tiny, max_plans_in_flight=depth, **tight) as engine:
        together = await complete_together(engine)
        assert engine.statistics().scheduler.num_preemptions > 0
        await assert_idle(engine)
    assert together == alone
