"""What running streams feel of long prompts: ``python -m bench.long_prompts``.

Streams decode, and prompts of 1,000 to 8,000 tokens arrive among them, one after the other. For
each ``--max-num-batched-tokens`` and number of plans in flight: the gaps between the streams'
tokens while a prompt is computed, beside those while none is, and how long the prompt takes to its
first token. A small budget keeps gaps short, a large one computes the prompt in fewer and dearer
steps; the table shows what the one costs the other. Engines take turns, each by itself.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from bench.engine_load import random_ids
from bench.report import asked, markdown, show
from bench.servers import MODEL
from trioserve import Engine, open_engine

__all__ = ["Measurement", "Setting", "gaps_within", "main", "measure", "table"]

BUDGETS = (64, 128, 256, 512, 1024, 2048)
LENGTHS = (1000, 2000, 4000, 8000)
STREAM_PROMPT = 128
STREAM_TOKENS = 1000
CALM = 1.0
"""Seconds without a long prompt, before the first and after each."""


@attrs.frozen(kw_only=True)
class Setting:
    """One engine's options."""

    budget: int
    plans: int


@attrs.frozen(kw_only=True)
class Measurement:
    """One long prompt in one round; times are in seconds, ``length`` 0 is the time without any."""

    budget: int
    plans: int
    round: int
    length: int
    ttft: float | None
    gap_p50: float
    gap_p99: float
    gap_max: float
    num_gaps: int


def gaps_within(times: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """The time from each token to the next of its stream, of those that end in this time."""
    return [
        later - earlier
        for tokens in times
        for earlier, later in itertools.pairwise(tokens)
        if begin < later <= end
    ]


async def measure(
    engine: Engine, setting: Setting, lengths: Sequence[int], streams: int, round: int
) -> list[Measurement]:
    """One engine's turn."""
    rng = random.Random(f"{setting.budget} {setting.plans} {round}")
    times: list[list[float]] = []
    found: list[Measurement] = []
    calm: list[float] = []

    async def calm_down() -> None:
        began = trio.current_time()
        await trio.sleep(CALM)
        calm.extend(gaps_within(times, began, trio.current_time()))

    async with trio.open_nursery() as nursery:
        all_decode = [trio.Event() for _ in range(streams)]
        for decodes in all_decode:
            nursery.start_soon(_stream, engine, rng, times, decodes)
        for decodes in all_decode:
            await decodes.wait()
        await calm_down()
        for length in lengths:
            began = trio.current_time()
            first: list[float] = []
            await _generate(engine, random_ids(rng, length), 1, first)
            gaps = gaps_within(times, began, first[0])
            found.append(_measurement(setting, round, length, first[0] - began, gaps))
            await calm_down()
        nursery.cancel_scope.cancel()
    return [_measurement(setting, round, 0, None, calm), *found]


def _measurement(
    setting: Setting, round: int, length: int, ttft: float | None, gaps: list[float]
) -> Measurement:
    if not gaps:
        raise ValueError(f"no stream got a token while a prompt of {length} tokens was computed")
    return Measurement(
        budget=setting.budget,
        plans=setting.plans,
        round=round,
        length=length,
        ttft=ttft,
        gap_p50=float(np.percentile(gaps, 50)),
        gap_p99=float(np.percentile(gaps, 99)),
        gap_max=max(gaps),
        num_gaps=len(gaps),
    )


async def _stream(
    engine: Engine, rng: random.Random, times: list[list[float]], decodes: trio.Event
) -> None:
    """Decode, one answer after the other."""
    while True:
        tokens: list[float] = []
        times.append(tokens)
        await _generate(engine, random_ids(rng, STREAM_PROMPT), STREAM_TOKENS, tokens, decodes)


async def _generate(
    engine: Engine,
    prompt: list[int],
    max_tokens: int,
    times: list[float],
    decodes: trio.Event | None = None,
) -> None:
    """``times`` is given when each chunk came; ``decodes`` is set at the first."""
    async with engine.generate(
        prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True
    ) as stream:
        async for _ in stream:
            times.append(trio.current_time())
            if decodes is not None:
                decodes.set()


async def _run(options: argparse.Namespace) -> list[Measurement]:
    settings = [
        Setting(budget=budget, plans=plans) for budget in options.budgets for plans in options.plans
    ]
    found: list[Measurement] = []
    for number in range(options.rounds):
        for setting in settings if number % 2 == 0 else reversed(settings):
            print(f"round {number + 1}: {setting.budget} tokens, {setting.plans} plans", flush=True)
            async with open_engine(
                options.model,
                max_num_batched_tokens=setting.budget,
                max_plans_in_flight=setting.plans,
            ) as engine:
                found += await measure(engine, setting, options.lengths, options.streams, number)
    return found


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: medians over the rounds."""
    heads = ("tokens in a step", "plans", "prompt", "TTFT s", "prompt tokens/s", "gap p50 · p99 ms")
    lines = []
    for key, group in itertools.groupby(sorted(measurements, key=_key_of), key=_key_of):
        each = list(group)
        budget, plans, length = key
        ttft = statistics.median(m.ttft or 0.0 for m in each)
        p50 = statistics.median(m.gap_p50 for m in each)
        p99 = statistics.median(m.gap_p99 for m in each)
        lines.append(
            (
                str(budget),
                str(plans),
                f"{length:,}" if length else "none",
                f"{ttft:.2f}" if length else "",
                f"{length / ttft:.0f}" if length else "",
                f"{p50 * 1e3:.1f} · {p99 * 1e3:.1f}",
            )
        )
    return markdown(heads, lines)


def _key_of(m: Measurement) -> tuple[int, int, int]:
    return m.budget, m.plans, m.length


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompts", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--plans", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    measurements = trio.run(_run, options)
    show(table(measurements), options.save, "long-prompts", measurements, options=asked(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
