"""Running streams beside long prompts: ``python -m bench.engine.long_prompts``.

Streams decode, and long prompts arrive among them: single ones, and a burst. For each target of
``--itl-target-ms`` (0 for none): the gaps between the streams' tokens while prompts are computed,
beside those while none is, and how long the prompts take until all have their first token. Engines
take turns, each by itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import trio

from bench.engine import random_ids
from bench.report import Rounds, in_turns, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.load import EmbeddedTarget, Record
from trioserve.load.figures import spread_of

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
    engine: Engine, bursts: Sequence[tuple[int, int]], streams: int, seed: str
) -> list[tuple[tuple[int, int], float, list[float]]]:
    """Return each burst's number and length of prompts, seconds to all first tokens, and gaps."""
    rng = random.Random(seed)
    target = EmbeddedTarget(engine=engine, fields={"temperature": 0.0, "ignore_eos": True})
    times, calm = list[list[float]](), list[float]()
    found = [((0, 0), 0.0, calm)]

    async def ask(length: int, max_tokens: int, record: Record) -> None:
        await target.ask({"prompt": random_ids(rng, length), "max_tokens": max_tokens}, record)
        if record.error:
            raise RuntimeError(record.error)

    async def decode() -> None:
        while True:
            record = Record(started=trio.current_time())
            times.append(record.chunks)
            await ask(STREAM_PROMPT, STREAM_TOKENS, record)

    async def calm_down() -> None:
        began = trio.current_time()
        await trio.sleep(CALM)
        calm.extend(gaps_within(times, began, trio.current_time()))

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(decode)
        while sum(map(bool, times)) < streams:
            await trio.sleep(0.01)
        await calm_down()
        for number, length in bursts:
            began = trio.current_time()
            prompts = [Record(started=began) for _ in range(number)]
            async with trio.open_nursery() as burst:
                for prompt in prompts:
                    burst.start_soon(ask, length, 1, prompt)
            end = max(prompt.chunks[0] for prompt in prompts)
            found.append(((number, length), end - began, gaps_within(times, began, end)))
            await calm_down()
        nursery.cancel_scope.cancel()
    return found


@script
async def compare(
    *,
    model: str = MODEL,
    targets: Sequence[float] = (0.0, 20.0, 50.0, 100.0, 200.0),
    lengths: Sequence[int] = (1000, 4000),
    burst: int = 16,
    streams: int = 16,
    rounds: int = 3,
) -> str:
    """Return a table of medians over the rounds."""
    all_of_it = Rounds()
    bursts = [*((1, length) for length in lengths), (burst, lengths[0])]
    for number, target in in_turns(rounds, targets):
        async with open_engine(model, itl_target_ms=target or None) as engine:
            for case, ttft, gaps in await measure(engine, bursts, streams, f"{target} {number}"):
                spread = spread_of(gaps)
                all_of_it.add((target, *case), ttft=ttft, p50=spread.p50, p99=spread.p99)
    lines = []
    for (target, number, length), of in sorted(all_of_it.medians().items()):
        prompts = ["none", "", ""]
        if number:
            name, rate = f"{number} x {length:,}", number * length / of["ttft"]
            prompts = [name, f"{of['ttft']:.2f}", f"{rate:.0f}"]
        gaps = f"{of['p50']:.1f} · {of['p99']:.1f}"
        lines.append([f"{target:g} ms" if target else "none", *prompts, gaps])
    heads = ["target", "prompts", "all first tokens s", "prompt tokens/s", "gap p50 · p99 ms"]
    return markdown(heads, lines)
