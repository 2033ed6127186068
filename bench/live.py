"""What it costs an engine to be watched: ``python -m bench.live``.

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
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from bench.engine_load import answer_all, random_ids
from bench.report import markdown, show
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.observability import live
from trioserve.protocol import wire

__all__ = ["Cost", "Rate", "main", "measure_cost", "measure_rate", "tables"]

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128
PICTURES = 40
REQUESTS_PER_STREAM = 4
UNWATCHED = 0.0
"""Stands for the interval of nobody."""


@attrs.frozen(kw_only=True)
class Cost:
    """One picture while so many requests are open: medians of processor time, in microseconds."""

    requests: int
    take_us: float
    encode_us: float
    size: int
    """Bytes of JSON."""


@attrs.frozen(kw_only=True)
class Rate:
    """A load, watched each ``interval`` seconds or not at all."""

    interval: float
    round: int
    tokens_per_second: float
    cpu_us_per_token: float
    """Processor time of the engine's process, without the worker's."""


async def measure_cost(engine: Engine, number: int, *, pictures: int = PICTURES) -> Cost:
    """The cost of a picture while ``number`` requests are open."""
    rng = random.Random(number)
    took: list[int] = []
    encoding: list[int] = []
    data = b""
    async with trio.open_nursery() as nursery:
        for _ in range(number):
            nursery.start_soon(_stay, engine, random_ids(rng, PROMPT_TOKENS))
        while engine.statistics().scheduler.num_running < min(number, engine.ready.max_num_seqs):
            await trio.sleep(0.01)
        with live.subject_of(engine).watched(
            requests=live.DEFAULT_REQUESTS, nodes=live.DEFAULT_NODES
        ) as watcher:
            for _ in range(pictures):
                await trio.sleep(0.05)
                began = time.thread_time_ns()
                picture = watcher.take()
                taken = time.thread_time_ns()
                data = msgspec.json.encode(picture)
                took.append(taken - began)
                encoding.append(time.thread_time_ns() - taken)
        nursery.cancel_scope.cancel()
    return Cost(
        requests=number,
        take_us=statistics.median(took) / 1000,
        encode_us=statistics.median(encoding) / 1000,
        size=len(data),
    )


async def _stay(engine: Engine, prompt: list[int]) -> None:
    most = engine.max_model_len - PROMPT_TOKENS
    async with engine.generate(prompt, max_tokens=most, ignore_eos=True) as stream:
        async for _ in stream:
            pass


async def measure_rate(engine: Engine, interval: float, *, streams: int, round: int) -> Rate:
    """A closed loop of ``streams``, watched each ``interval`` seconds."""
    rng = random.Random(f"live {round}")
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(streams * REQUESTS_PER_STREAM)]

    async def look() -> None:
        async with live.watch(engine, interval=interval) as pictures:
            async for picture in pictures:
                msgspec.json.encode(picture)

    async with trio.open_nursery() as nursery:
        if interval != UNWATCHED:
            nursery.start_soon(look)
        began = time.process_time()
        run = await answer_all(engine, prompts, output=OUTPUT_TOKENS, at_a_time=streams)
        spent = time.process_time() - began
        nursery.cancel_scope.cancel()
    num_tokens = len(prompts) * OUTPUT_TOKENS
    return Rate(
        interval=interval,
        round=round,
        tokens_per_second=num_tokens / run.duration,
        cpu_us_per_token=spent / num_tokens * 1e6,
    )


def tables(costs: Sequence[Cost], rates: Sequence[Rate]) -> str:
    """Markdown: a picture's cost, and medians over the rounds beside the same round unwatched."""
    heads = ("open requests", "a picture µs", "its JSON µs", "KiB")
    lines = [
        (f"{c.requests:,}", f"{c.take_us:.0f}", f"{c.encode_us:.0f}", f"{c.size / 1024:.0f}")
        for c in costs
    ]
    parts = [markdown(heads, lines)]
    base = {rate.round: rate for rate in rates if rate.interval == UNWATCHED}
    rows = []
    for interval in sorted({rate.interval for rate in rates}):
        own = [rate for rate in rates if rate.interval == interval]
        ratio = statistics.median(
            rate.tokens_per_second / base[rate.round].tokens_per_second for rate in own
        )
        cpu = statistics.median(rate.cpu_us_per_token for rate in own)
        tokens = statistics.median(rate.tokens_per_second for rate in own)
        word = "nobody" if interval == UNWATCHED else f"each {interval:g} s"
        rows.append((word, f"{tokens:.0f}", f"{ratio:.3f}", f"{cpu:.1f}"))
    if rows:
        parts.append(markdown(("watched", "tokens/s", "of unwatched", "CPU µs per token"), rows))
    return "\n\n".join(parts)


async def _run(options: argparse.Namespace) -> tuple[list[Cost], list[Rate]]:
    costs: list[Cost] = []
    rates: list[Rate] = []
    slow, fast = (wire.MockSteps(step_seconds=each) for each in (0.05, options.step))
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_queued_reqs": 20_000}
    async with open_engine(options.model, mock=slow, **limits) as engine:
        for number in options.requests:
            costs.append(await measure_cost(engine, number))
            await engine.wait_idle()
    async with open_engine(options.model, mock=fast, **limits) as engine:
        await measure_rate(engine, UNWATCHED, streams=options.streams, round=-1)
        for number in range(options.rounds):
            order = [UNWATCHED, *options.intervals]
            for interval in order if number % 2 == 0 else order[::-1]:
                rates.append(
                    await measure_rate(engine, interval, streams=options.streams, round=number)
                )
                print(f"round {number + 1}: {rates[-1].tokens_per_second:.0f} tokens/s", flush=True)
    return costs, rates


def main(arguments: list[str]) -> int:
    """Measure, print tables, and save them if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.live", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--requests", type=int, nargs="+", default=[0, 100, 1000, 10_000])
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.5, 0.1])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step", type=float, default=0.002, help="seconds of a mock step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    costs, rates = trio.run(_run, options)
    show(tables(costs, rates), options.save, "live", [*costs, *rates])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
