"""The time to the first token by where the prompt's pages are: ``python -m tests.engine.kv_tiers``.

A prompt is computed by one engine, which copies its pages to the host's memory and to files. The
next engine finds them on disk, and then in memory. The files are in the system's page cache, as
those that were used lately are; a disk that has to be read takes longer. In a third engine one
worker computes the prompt, and the other one takes the pages from it. Then prompts are handed over
to a worker that decodes, as one chunk and in chunks of 256 tokens, of which all but the last go
ahead. Each worker has one thread.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import trio

from bench.report import Made, Rounds, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine

_VOCABULARY = range(20, 40_000)
_PATIENCE = 120.0
_CHUNK = 256
"""Tokens of a chunk, where prompts go ahead."""


def prompts_of(lengths: Sequence[int], seed: int) -> dict[int, list[int]]:
    """Return a prompt of each length. They have no beginning in common."""
    numbers = random.Random(seed)
    return {length: [numbers.choice(_VOCABULARY) for _ in range(length + 1)] for length in lengths}


async def first_token(
    engine: Engine, prompt: Sequence[int], adapter: str = ""
) -> tuple[float, int]:
    """Return the milliseconds to the first token, and how many tokens were cached."""
    began = time.perf_counter()
    answer = await engine.complete(list(prompt), adapter=adapter, max_tokens=1, temperature=0)
    return 1e3 * (time.perf_counter() - began), answer.usage.cached_tokens


async def second_token(engine: Engine, prompt: Sequence[int]) -> float:
    """Return the milliseconds from the first token to the second."""
    times = []
    async with engine.generate(list(prompt), max_tokens=2, temperature=0) as chunks:
        async for _ in chunks:
            times.append(time.perf_counter())
    return 1e3 * (times[1] - times[0])


async def until_all_are_written(engine: Engine) -> None:
    """Wait until all pages that were copied to the host are on disk."""
    with trio.fail_after(_PATIENCE):
        while True:
            counts = engine.statistics().scheduler
            if counts.pages_written >= counts.pages_offloaded > 0:
                return
            await trio.sleep(0.05)


async def until_found(engine: Engine) -> None:
    """Wait until the engine knows which pages are on disk."""
    with trio.fail_after(_PATIENCE):
        while not engine.statistics().scheduler.disk_pages:
            await trio.sleep(0.05)


async def add_round(found: Rounds, model: str, lengths: Sequence[int], number: int) -> None:
    """Add the figures of new prompts: computed, read from the disk, and found in memory."""
    prompts = prompts_of(lengths, number)
    longest = max(lengths)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            **{"device": "cpu", "dtype": "bfloat16", "max_model_len": longest + 64},
            "num_threads": 1,
            # Room for two of the longest, so that the others are copied to the host.
            **{"num_gpu_blocks_override": 2 * (longest // 16 + 4), "kv_offloading_bytes": 1 << 30},
            "kv_offloading_dir": folder,
        }
        async with open_engine(model, **options) as engine:
            await engine.complete([5] * 40, max_tokens=4)
            for length, prompt in prompts.items():
                took, _ = await first_token(engine, prompt)
                found.add(length, computed=took)
            for filler in range(3):
                await first_token(engine, prompts_of([longest], -3 * number - filler - 1)[longest])
            await until_all_are_written(engine)
        async with open_engine(model, **options) as engine:
            await until_found(engine)
            await engine.complete([5] * 40, max_tokens=4)
            for length, prompt in prompts.items():
                took, cached = await first_token(engine, prompt)
                found.add(length, disk=took, cached=cached)
                took, _ = await first_token(engine, prompt)
                found.add(length, memory=took)
        del options["kv_offloading_dir"], options["num_gpu_blocks_override"]
        options |= {"data_parallel_size": 2, "routing_policy": "round_robin"}
        async with open_engine(model, **options) as engine:
            for length, prompt in prompts.items():
                await first_token(engine, prompt)
                took, cached = await first_token(engine, prompt)
                found.add(length, sibling=took, lent=cached)
        options["disaggregation"] = ("prefill", "decode")
        for name, chunk in (("whole", longest + 64), ("ahead", _CHUNK)):
            async with open_engine(model, max_num_batched_tokens=chunk, **options) as engine:
                await second_token(engine, [5] * 40)
                for length, prompt in prompts.items():
                    found.add(length, **{name: await second_token(engine, prompt)})


@script
async def measure(
    model: str = MODEL,
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048),
    rounds: int = 5,
) -> Made:
    """Return a line for each length of a prompt."""
    found = Rounds()
    for number in range(rounds):
        await add_round(found, model, lengths, number)
    lines = []
    for length, each in found.medians().items():
        figures = [f"{each[name]:.1f}" for name in ("computed", "sibling", "disk", "memory")]
        figures += [f"{each[name]:.1f}" for name in ("whole", "ahead")]
        found_there = [f"{each['lent']:.0f}", f"{each['cached']:.0f}"]
        lines.append([length, *figures, *found_there])
    heads = ["tokens of the prompt", "computed, ms", "taken from another worker, ms"]
    heads += ["read from the disk, ms", "in memory, ms"]
    heads += ["handed over: from the first token to the second, ms", "in chunks, ms"]
    heads += ["tokens taken from the other worker", "tokens read from the disk"]
    return Made(markdown(heads, lines))
