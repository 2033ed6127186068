"""The tokens a second of several workers: ``python -m tests.engine.routing.scaling``.

The workers compute nothing, and a step takes ``--step-ms``. Each has ``--streams`` streams that a
closed loop keeps full, so its rate is known; what is measured is what the one process adds that
makes all plans and hands out all tokens. Its processor time for a token is the bound: as many
workers are too many as keep one core of it busy. Streams are read in this process, without HTTP.
"""

from __future__ import annotations

import random
import time
from typing import Any

import attrs
import psutil
import trio

from bench.report import Made, Rounds, Verdict, in_turns, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.protocol.wire import MockSteps

TARGET = 0.95
"""The least share of as many times one worker's rate, up to :data:`UP_TO` workers."""
UP_TO = 4
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 512
_WARM_UP = 3.0


@attrs.frozen(kw_only=True)
class _Counts:
    """Counts of an engine, and the processor seconds of its process and its workers."""

    at: float
    tokens: int
    steps: int
    engine: float
    workers: float

    @classmethod
    def of(cls, engine: Engine) -> _Counts:
        scheduler = engine.statistics().scheduler
        times = [psutil.Process(each.pid).cpu_times() for each in engine.workers]
        return cls(
            at=time.perf_counter(),
            tokens=scheduler.num_tokens_sampled,
            steps=scheduler.num_steps,
            engine=time.process_time(),
            workers=sum(each.user + each.system for each in times) / len(times),
        )


async def ask_on(engine: Engine, number: int, num_tokens: int, vocabulary: range) -> None:
    """Keep one stream of ``num_tokens`` after the other running; ``number`` tells clients apart."""
    numbers = random.Random(number)
    # The first requests end at different times, so that later ones don't come all at once.
    length = numbers.randint(1, num_tokens)
    while True:
        prompt = [numbers.choice(vocabulary) for _ in range(PROMPT_TOKENS)]
        async with engine.generate(prompt, max_tokens=length, ignore_eos=True) as stream:
            async for _ in stream:
                pass
        length = num_tokens


async def figures_of(
    model: str, workers: int, streams: int, step: float, seconds: float
) -> dict[str, float]:
    """Return the figures of one number of workers."""
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "data_parallel_size": workers}
    options["max_num_seqs"] = streams
    async with (
        open_engine(model, mock=MockSteps(step_seconds=step), **options) as engine,
        trio.open_nursery() as nursery,
    ):
        for number in range(workers * streams):
            nursery.start_soon(ask_on, engine, number, OUTPUT_TOKENS, range(20, 40_000))
        await trio.sleep(_WARM_UP)
        before = _Counts.of(engine)
        await trio.sleep(seconds)
        after = _Counts.of(engine)
        nursery.cancel_scope.cancel()
    passed, tokens = after.at - before.at, after.tokens - before.tokens
    steps, cpu = after.steps - before.steps, after.engine - before.engine
    return {
        "tokens": tokens / passed,
        "messages": 2 * steps / passed,
        "core": cpu / passed,
        "token_us": 1e6 * cpu / tokens,
        "step_us": 1e6 * cpu / steps,
        "worker_core": (after.workers - before.workers) / passed,
    }


@script
async def measure(
    model: str = MODEL,
    workers: tuple[int, ...] = (1, 2, 4, 8, 16),
    streams: int = 32,
    step_ms: float = 20.0,
    seconds: float = 8.0,
    rounds: int = 2,
) -> Made:
    """Return a line for each number of workers."""
    found = Rounds()
    for _, number in in_turns(rounds, workers):
        found.add(number, **await figures_of(model, number, streams, step_ms / 1000, seconds))
    medians = found.medians()
    first = workers[0]
    lines, verdicts = [], []
    for number, each in medians.items():
        share = found.ratio(number, first, "tokens") * first / number
        if first < number <= UP_TO:
            what = f"tokens/s of {number} workers that compute nothing"
            verdict = Verdict(
                what=what, against=f"{number} times one", bound=TARGET, reached=share, rounds=rounds
            )
            verdicts.append(verdict)
        cells = [f"{each['tokens']:.0f}", f"{share:.3f}", f"{each['messages']:.0f}"]
        cells += [f"{each['core']:.0%}", f"{each['token_us']:.1f}", f"{each['step_us']:.0f}"]
        bound = 1e6 / each["token_us"] / (medians[first]["tokens"] / first)
        lines.append([number, *cells, f"{each['worker_core']:.1%}", f"{bound:.0f}"])
    heads = ["workers", "tokens/s", "of linear", "messages/s", "core of the engine's process"]
    heads += ["its CPU µs per token", "its CPU µs per step", "core of a worker's process"]
    table = markdown([*heads, "workers that keep a core busy"], lines)
    return Made(table, {"verdicts": [attrs.asdict(each) for each in verdicts]})
