"""The cost of watching an engine: ``python -m bench.engine.live``.

First the processor time of one picture, while so many requests are open; then the throughput of an
engine whose worker computes nothing, unwatched and watched, in turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from bench.engine import answer_all, random_ids
from bench.report import Rounds, markdown, run_script
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.observability import live
from trioserve.protocol import wire

PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS_PER_STREAM = 64, 128, 4
UNWATCHED = 0.0
"""The interval of no watcher."""


async def measure_cost(engine: Engine, number: int, pictures: int = 40) -> tuple[float, float, int]:
    """Return the microseconds to take and to encode a picture of ``number`` requests, its bytes."""
    rng = random.Random(number)
    took: list[int] = []
    encoding: list[int] = []
    data = b""

    async def stay(prompt: list[int]) -> None:
        most = engine.max_model_len - PROMPT_TOKENS
        async with engine.generate(prompt, max_tokens=most, ignore_eos=True) as stream:
            async for _ in stream:
                pass

    async with trio.open_nursery() as nursery:
        for _ in range(number):
            nursery.start_soon(stay, random_ids(rng, PROMPT_TOKENS))
        while engine.statistics().scheduler.num_running < min(number, engine.ready.max_num_seqs):
            await trio.sleep(0.01)
        limits = {"requests": live.DEFAULT_REQUESTS, "nodes": live.DEFAULT_NODES}
        with live.subject_of(engine).watched(**limits) as watcher:
            for _ in range(pictures):
                await trio.sleep(0.05)
                began = time.thread_time_ns()
                snapshot = watcher.take()
                taken = time.thread_time_ns()
                data = msgspec.json.encode(snapshot)
                took.append(taken - began)
                encoding.append(time.thread_time_ns() - taken)
        nursery.cancel_scope.cancel()
    return statistics.median(took) / 1000, statistics.median(encoding) / 1000, len(data)


async def measure_rate(
    engine: Engine, interval: float, *, streams: int, round: int
) -> dict[str, float]:
    """Run a closed loop of ``streams``, watched each ``interval`` seconds.

    Returns the tokens a second, and the processor time of this process for each.
    """
    rng = random.Random(f"live {round}")
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(streams * REQUESTS_PER_STREAM)]

    async def look() -> None:
        async with live.watch(engine, interval=interval) as pictures:
            async for snapshot in pictures:
                msgspec.json.encode(snapshot)

    async with trio.open_nursery() as nursery:
        if interval != UNWATCHED:
            nursery.start_soon(look)
        began = time.process_time()
        run = await answer_all(engine, prompts, output=OUTPUT_TOKENS, at_a_time=streams)
        spent = time.process_time() - began
        nursery.cancel_scope.cancel()
    tokens = len(prompts) * OUTPUT_TOKENS
    return {"rate": tokens / run.duration, "cpu_us": spent / tokens * 1e6}


async def compare(options: argparse.Namespace) -> str:
    """Return two tables: a picture's cost, and rates beside those of the same round unwatched."""
    slow, fast = (wire.MockSteps(step_seconds=each) for each in (0.05, options.step))
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_queued_reqs": 20_000}
    costs, rounds = [], Rounds()
    async with open_engine(options.model, mock=slow, **limits) as engine:
        for number in options.requests:
            take, encode, size = await measure_cost(engine, number)
            costs.append([f"{number:,}", f"{take:.0f}", f"{encode:.0f}", f"{size / 1024:.0f}"])
            await engine.wait_idle()
    order = [UNWATCHED, *sorted(options.intervals)]
    async with open_engine(options.model, mock=fast, **limits) as engine:
        await measure_rate(engine, UNWATCHED, streams=options.streams, round=-1)
        for number in range(options.rounds):
            for interval in order if number % 2 == 0 else order[::-1]:
                found = await measure_rate(engine, interval, streams=options.streams, round=number)
                rounds.add(interval, **found)
    rates = []
    for interval in order:
        of, ratio = rounds.medians()[interval], rounds.ratio(interval, UNWATCHED, "rate")
        word = "nobody" if interval == UNWATCHED else f"each {interval:g} s"
        rates.append([word, f"{of['rate']:.0f}", f"{ratio:.3f}", f"{of['cpu_us']:.1f}"])
    of_pictures = markdown(["open requests", "a picture µs", "its JSON µs", "KiB"], costs)
    heads = ["watched", "tokens/s", "of unwatched", "CPU µs per token"]
    return f"{of_pictures}\n\n{markdown(heads, rates)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print tables."""
    return run_script(
        *("live", compare, arguments),
        **{"model": MODEL, "requests": [0, 100, 1000, 10_000], "intervals": [0.5, 0.1]},
        **{"streams": 128, "step": 0.002, "rounds": 6},
    )


if __name__ == "__main__":
    sys.exit(main())
