"""Streams while long prompts arrive: ``python -m tests.engine.routing.disaggregation``.

Two workers that compute nothing have the step times of an 8B model on an H200. ``--streams``
streams run, and prompts of ``--prompt`` tokens arrive at a fixed rate, with a few tokens of output
each. The gaps between tokens of the streams are compared: without these prompts, with prompts
beside streams on both workers (chunked prefill), with one worker for prompts and one for outputs,
and where the loads decide. The pages that are handed over are empty, so the time to copy real ones
isn't in it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import trio

from bench.report import Made, Rounds, Verdict, in_turns, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.protocol.wire import MockSteps

STEP, TOKEN = 8e-3, 3e-5
"""Seconds of a step, and of each token in it."""
TARGET = 1.2
"""Most times the gaps without prompts that those with prompts may be, at the 99th percentile."""
CASES: dict[str, tuple[str, ...]] = {
    "no prompts": ("prefill", "decode"),
    "prompts beside streams": (),
    "apart": ("prefill", "decode"),
    "auto": ("auto",),
}
_VOCABULARY = range(20, 40_000)
_OUTPUT = 16
_WARM_UP = 3.0


@attrs.define
class _Watched:
    """Times of one run, in seconds."""

    begins: float
    gaps: list[float] = attrs.field(factory=list)
    ttfts: list[float] = attrs.field(factory=list)


def prompt_of(numbers: random.Random, length: int) -> list[int]:
    """Return a prompt that no other one shares a beginning with."""
    return [numbers.choice(_VOCABULARY) for _ in range(length)]


async def stream_on(engine: Engine, number: int, watched: _Watched) -> None:
    """Keep a stream running, and note its gaps once the measurement has begun."""
    numbers = random.Random(number)
    while True:
        last: float | None = None
        prompt = prompt_of(numbers, 200)
        async with engine.generate(prompt, max_tokens=1500, ignore_eos=True) as chunks:
            async for _ in chunks:
                now = time.perf_counter()
                if last is not None and last >= watched.begins:
                    watched.gaps.append(now - last)
                last = now


async def ask_once(engine: Engine, prompt: Sequence[int], watched: _Watched) -> None:
    """Note the time to the first token of a prompt."""
    began = time.perf_counter()
    first: float | None = None
    options: dict[str, Any] = {"max_tokens": _OUTPUT, "ignore_eos": True}
    async with engine.generate(list(prompt), **options) as chunks:
        async for _ in chunks:
            first = first or time.perf_counter()
    if first is not None and began >= watched.begins:
        watched.ttfts.append(first - began)


async def figures_of(
    model: str, case: str, streams: int, prompt: int, rate: float, seconds: float
) -> dict[str, float]:
    """Return the figures of one case."""
    options: dict[str, Any] = {"device": "cpu", "data_parallel_size": 2, "max_model_len": 4096}
    options |= {"disaggregation": CASES[case], "num_threads": 1, "kv_offloading_bytes": 1 << 30}
    mock = MockSteps(step_seconds=STEP, token_seconds=TOKEN)
    numbers = random.Random(0)
    # Made before, because it would hold up the event loop.
    prompts = [prompt_of(numbers, prompt) for _ in range(math.ceil(rate * (_WARM_UP + seconds)))]
    async with (
        open_engine(model, mock=mock, **options) as engine,
        trio.open_nursery() as nursery,
    ):
        watched = _Watched(time.perf_counter() + _WARM_UP)
        for number in range(streams):
            nursery.start_soon(stream_on, engine, number + 1, watched)
        ends = trio.current_time() + _WARM_UP + seconds
        for each in prompts:
            await trio.sleep(1 / rate)
            if case != "no prompts":
                nursery.start_soon(ask_once, engine, each, watched)
        await trio.sleep_until(ends)
        nursery.cancel_scope.cancel()
    gaps = 1e3 * np.array(watched.gaps)
    ttfts = 1e3 * np.array(watched.ttfts or [np.nan])
    return {
        **{f"itl_p{q}": float(np.percentile(gaps, q)) for q in (50, 99)},
        **{f"ttft_p{q}": float(np.percentile(ttfts, q)) for q in (50, 99)},
        "rate": len(gaps) / seconds,
    }


def _verdict(ratio: float, rounds: int) -> Verdict:
    return Verdict(
        what="gaps between tokens at p99, prompts computed apart",
        against="those without prompts",
        bound=TARGET,
        reached=ratio,
        at_most=True,
        rounds=rounds,
    )


@script
async def measure(
    model: str = MODEL,
    streams: int = 16,
    prompt: int = 2000,
    rate: float = 5.0,
    seconds: float = 10.0,
    rounds: int = 3,
) -> Made:
    """Return a line for each case."""
    found = Rounds()
    for _, case in in_turns(rounds, list(CASES)):
        found.add(case, **await figures_of(model, case, streams, prompt, rate, seconds))
    lines, verdicts = [], []
    for case, each in found.medians().items():
        ratio = found.ratio(case, "no prompts", "itl_p99")
        if case == "apart":
            verdicts.append(_verdict(ratio, rounds))
        cells = [f"{each['itl_p50']:.1f} · {each['itl_p99']:.1f}", f"{ratio:.2f}"]
        has_prompts = case != "no prompts"
        ttft = f"{each['ttft_p50']:.0f} · {each['ttft_p99']:.0f}" if has_prompts else "none"
        lines.append([case, *cells, ttft, f"{each['rate']:.0f}"])
    heads = ["prompts", "gaps p50 · p99 ms", "p99, times that without", "TTFT p50 · p99 ms"]
    heads += ["tokens/s of the streams"]
    facts = {"verdicts": [attrs.asdict(each) for each in verdicts]}
    return Made(markdown(heads, lines), facts)
