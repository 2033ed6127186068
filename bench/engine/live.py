"""The cost of watching an engine: ``python -m bench.engine.live``.

First the processor time of one picture, while so many requests are open; then the throughput of an
engine whose worker computes nothing, unwatched and watched, in turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import trio

from bench.engine import answer_all, measure_streams, random_ids
from bench.report import Rounds, in_turns, markdown, script
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
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(number)]
    most = engine.max_model_len - PROMPT_TOKENS
    took, encoding = list[float](), list[float]()
    async with trio.open_nursery() as nursery:
        if prompts:
            nursery.start_soon(partial(answer_all, engine, prompts, output=most, at_a_time=number))
        while engine.statistics().scheduler.num_running < min(number, engine.ready.max_num_seqs):
            await trio.sleep(0.01)
        limits = {"requests": live.DEFAULT_REQUESTS, "nodes": live.DEFAULT_NODES}
        with live.monitor_of(engine).watched(**limits) as watcher:
            for _ in range(pictures):
                await trio.sleep(0.05)
                snapshot = _timed(took, watcher.take)
                data = _timed(encoding, partial(msgspec.json.encode, snapshot))
        nursery.cancel_scope.cancel()
    return statistics.median(took), statistics.median(encoding), len(data)


def _timed(microseconds: list[float], act: Callable[[], Any]) -> Any:
    began = time.thread_time_ns()
    result = act()
    microseconds.append((time.thread_time_ns() - began) / 1000)
    return result


async def measure_rate(
    engine: Engine, interval: float, *, streams: int, round: int
) -> dict[str, float]:
    """Run a closed loop of ``streams``, watched each ``interval`` seconds.

    Returns the tokens a second, and the processor time of this process for each.
    """
    lengths = {"prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS, "requests": REQUESTS_PER_STREAM}

    async def look() -> None:
        async with live.watch(engine, interval=interval) as pictures:
            async for snapshot in pictures:
                msgspec.json.encode(snapshot)

    async with trio.open_nursery() as nursery:
        if interval != UNWATCHED:
            nursery.start_soon(look)
        began = time.process_time()
        figures = await measure_streams(engine, streams, round, **lengths)
        spent = time.process_time() - began
        nursery.cancel_scope.cancel()
    cpu_us = spent / figures.completion_tokens * 1e6
    return {"rate": figures.output_tokens_per_second, "cpu_us": cpu_us}


@script
async def compare(
    *,
    model: str = MODEL,
    requests: Sequence[int] = (0, 100, 1000, 10_000),
    intervals: Sequence[float] = (0.5, 0.1),
    streams: int = 128,
    step: float = 0.002,
    rounds: int = 6,
) -> str:
    """Return two tables: a picture's cost, and rates beside those of the same round unwatched."""
    slow, fast = (wire.MockSteps(step_seconds=each) for each in (0.05, step))
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_queued_reqs": 20_000}
    costs, rates, found = [], [], Rounds()
    async with open_engine(model, mock=slow, **limits) as engine:
        for number in requests:
            take, encode, size = await measure_cost(engine, number)
            costs.append([f"{number:,}", f"{take:.0f}", f"{encode:.0f}", f"{size / 1024:.0f}"])
            await engine.wait_idle()
    async with open_engine(model, mock=fast, **limits) as engine:
        await measure_rate(engine, UNWATCHED, streams=streams, round=-1)
        for number, interval in in_turns(rounds, [UNWATCHED, *sorted(intervals)]):
            figures = await measure_rate(engine, interval, streams=streams, round=number)
            found.add(interval, **figures)
    for interval, of in found.medians().items():
        word = "nobody" if interval == UNWATCHED else f"each {interval:g} s"
        ratio = found.ratio(interval, UNWATCHED, "rate")
        rates.append([word, f"{of['rate']:.0f}", f"{ratio:.3f}", f"{of['cpu_us']:.1f}"])
    of_pictures = markdown(["open requests", "a picture µs", "its JSON µs", "KiB"], costs)
    heads = ["watched", "tokens/s", "of unwatched", "CPU µs per token"]
    return f"{of_pictures}\n\n{markdown(heads, rates)}"
