"""One prefix, many requests, in the engine itself: ``python -m bench.shared_prefix_engine``.

16 requests, 4 at a time, that begin with the same 1,000 tokens, have 32 of their own and get 64
out, in an engine that shares prefixes and in one that doesn't. Per round the prefix is new to both,
and they take turns. The table shows what was computed of the prompts, which says by itself whether
the prefix was computed once, the time to the first token and the rate. The same over HTTP beside
other servers is ``bench.shared_prefix``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from bench.engine_load import answer_all, random_ids
from bench.report import asked, markdown, show
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.load import Run

__all__ = ["Load", "Measurement", "main", "measure", "table"]


@attrs.frozen(kw_only=True)
class Load:
    """What is asked for, in tokens and requests."""

    prefix: int = 1000
    own: int = 32
    output: int = 64
    requests: int = 16
    at_a_time: int = 4


@attrs.frozen(kw_only=True)
class Measurement:
    """One engine in one round. Times are in seconds."""

    shares: bool
    round: int
    prompt_tokens: int
    prompt_tokens_computed: int
    ttft_p50: float
    ttft_p99: float
    tokens_per_second: float


async def measure(engine: Engine, load: Load, *, shares: bool, round: int) -> Measurement:
    """One engine's turn.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(f"shared prefix {round}")
    prefix = random_ids(rng, load.prefix)
    prompts = [prefix + random_ids(rng, load.own) for _ in range(load.requests)]
    before = engine.statistics().scheduler.num_tokens_computed
    run = await answer_all(engine, prompts, output=load.output, at_a_time=load.at_a_time)
    computed = engine.statistics().scheduler.num_tokens_computed - before
    # All tokens of an answer but its last are computed, too.
    of_prompts = computed - load.requests * (load.output - 1)
    return _measurement(run, load, of_prompts, shares=shares, round=round)


def _measurement(run: Run, load: Load, computed: int, *, shares: bool, round: int) -> Measurement:
    waits = [record.chunks[0] - record.started for record in run.records]
    return Measurement(
        shares=shares,
        round=round,
        prompt_tokens=load.requests * (load.prefix + load.own),
        prompt_tokens_computed=computed,
        ttft_p50=float(np.percentile(waits, 50)),
        ttft_p99=float(np.percentile(waits, 99)),
        tokens_per_second=load.requests * load.output / run.duration,
    )


async def _run(options: argparse.Namespace) -> list[Measurement]:
    load = Load(
        prefix=options.prefix,
        own=options.own,
        output=options.output,
        requests=options.requests,
        at_a_time=options.at_a_time,
    )
    found: list[Measurement] = []
    async with (
        open_engine(options.model) as sharing,
        open_engine(options.model, enable_prefix_caching=False) as plain,
    ):
        engines = {True: sharing, False: plain}
        warm_up = attrs.evolve(load, requests=1, prefix=16, output=2)
        for shares, engine in engines.items():
            await measure(engine, warm_up, shares=shares, round=-1)
        for number in range(options.rounds):
            for shares in (True, False) if number % 2 == 0 else (False, True):
                found.append(await measure(engines[shares], load, shares=shares, round=number))
    return found


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: medians over the rounds, and the plain engine's by the sharing one's."""
    heads = ("prefix", "prompt tokens", "computed", "TTFT p50 · p99 ms", "output tokens/s")
    lines = []
    for shares in (True, False):
        own = [m for m in measurements if m.shares is shares]
        lines.append(
            (
                "shared" if shares else "computed by each",
                f"{own[0].prompt_tokens:,}",
                f"{statistics.median(m.prompt_tokens_computed for m in own):,.0f}",
                f"{statistics.median(m.ttft_p50 for m in own) * 1e3:.0f} · "
                f"{statistics.median(m.ttft_p99 for m in own) * 1e3:.0f}",
                f"{statistics.median(m.tokens_per_second for m in own):.1f}",
            )
        )
    pairs = [
        (one, other)
        for one in measurements
        for other in measurements
        if one.shares and not other.shares and one.round == other.round
    ]
    rate = statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
    wait = statistics.median(a.ttft_p50 / b.ttft_p50 for a, b in pairs)
    lines.append(("ratio", "", "", f"{wait:.2f}", f"{rate:.2f}"))
    return markdown(heads, lines)


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.shared_prefix_engine", description=__doc__
    )
    parser.add_argument("--model", default=MODEL)
    for name, value in attrs.asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    measurements = trio.run(_run, options)
    show(
        table(measurements),
        options.save,
        "shared-prefix-engine",
        measurements,
        options=asked(options),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
