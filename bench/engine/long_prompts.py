"""Running streams beside long prompts: ``python -m bench.engine.long_prompts``.

Streams decode, and long prompts arrive among them, one after the other. For each
``--max-num-batched-tokens`` (``--budgets``) and number of plans in flight: the gaps between the
streams' tokens while a prompt is computed, beside those while none is, and how long the prompt
takes to its first token. Engines take turns, each by itself.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence

import trio

from bench.engine import random_ids
from bench.report import Rounds, markdown, percentile, run_script
from bench.servers import MODEL
from trioserve import Engine, open_engine

STREAM_PROMPT, STREAM_TOKENS = 128, 1000
CALM = 1.0
"""Seconds without a long prompt, before the first and after each."""


def gaps_within(times: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Return the time from each token to the next of its stream, of those that end in this time."""
    return [
        later - earlier
        for tokens in times
        for earlier, later in itertools.pairwise(tokens)
        if begin < later <= end
    ]


async def measure(
    engine: Engine, lengths: Sequence[int], streams: int, seed: str
) -> list[tuple[int, float, list[float]]]:
    """Return each prompt's length, seconds to its first token, and gaps; length 0 is no prompt."""
    rng = random.Random(seed)
    times: list[list[float]] = []
    calm: list[float] = []
    found = [(0, 0.0, calm)]

    async def generate(length: int, max_tokens: int, at: list[float], decodes: trio.Event) -> None:
        asked = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        async with engine.generate(random_ids(rng, length), **asked) as stream:
            async for _ in stream:
                at.append(trio.current_time())
                decodes.set()

    async def decode(decodes: trio.Event) -> None:
        while True:
            times.append([])
            await generate(STREAM_PROMPT, STREAM_TOKENS, times[-1], decodes)

    async def calm_down() -> None:
        began = trio.current_time()
        await trio.sleep(CALM)
        calm.extend(gaps_within(times, began, trio.current_time()))

    async with trio.open_nursery() as nursery:
        all_decode = [trio.Event() for _ in range(streams)]
        for decodes in all_decode:
            nursery.start_soon(decode, decodes)
        for decodes in all_decode:
            await decodes.wait()
        await calm_down()
        for length in lengths:
            began, first = trio.current_time(), list[float]()
            await generate(length, 1, first, trio.Event())
            gaps = gaps_within(times, began, first[0])
            if not gaps:
                raise ValueError(f"no stream got a token during a prompt of {length} tokens")
            found.append((length, first[0] - began, gaps))
            await calm_down()
        nursery.cancel_scope.cancel()
    return found


async def compare(options: argparse.Namespace) -> str:
    """Return a table of medians over the rounds."""
    settings = list(itertools.product(options.budgets, options.plans))
    rounds = Rounds()
    for number in range(options.rounds):
        for budget, plans in settings if number % 2 == 0 else reversed(settings):
            print(f"round {number + 1}: {budget} tokens, {plans} plans", flush=True)
            limits = {"max_num_batched_tokens": budget, "max_plans_in_flight": plans}
            async with open_engine(options.model, **limits) as engine:
                seed = f"{budget} {plans} {number}"
                for length, ttft, gaps in await measure(
                    engine, options.lengths, options.streams, seed
                ):
                    p50, p99 = (1e3 * percentile(gaps, percent) for percent in (50, 99))
                    rounds.add((budget, plans, length), ttft=ttft, p50=p50, p99=p99)
    lines = []
    for (budget, plans, length), of in sorted(rounds.medians().items()):
        prompt = ["none", "", ""]
        if length:
            prompt = [f"{length:,}", f"{of['ttft']:.2f}", f"{length / of['ttft']:.0f}"]
        lines.append([budget, plans, *prompt, f"{of['p50']:.1f} · {of['p99']:.1f}"])
    heads = ["tokens in a step", "plans", "prompt", "TTFT s", "prompt tokens/s", "gap p50 · p99 ms"]
    return markdown(heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    return run_script(
        *("long_prompts", compare, arguments),
        **{"model": MODEL, "budgets": [64, 128, 256, 512, 1024, 2048], "plans": [1, 2]},
        **{"lengths": [1000, 2000, 4000, 8000], "streams": 8, "rounds": 3},
    )


if __name__ == "__main__":
    sys.exit(main())
