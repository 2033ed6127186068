"""Conversations that come back after their pages have gone: ``python -m bench.offloading``.

Eight conversations of 1,000 tokens take turns, in a KV cache that holds three of them. When one
comes back, an engine without memory on the host computes it again, one with such memory copies its
pages back, and one whose cache holds all of them finds them where they were, which is the best that
can be had. The three take turns, with conversations that are new to all in each round. On a CPU the
host's memory is the same memory, so that this shows what copying and its bookkeeping cost.
"""

from __future__ import annotations

import argparse
import contextlib
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

__all__ = ["KINDS", "Load", "Measurement", "main", "measure", "options_of", "table"]

KINDS = ("computed again", "copied back", "all in the cache")
PAGE_SIZE = 16
HOST_BYTES = 1 << 30


@attrs.frozen(kw_only=True)
class Load:
    """What is asked for, in tokens and conversations."""

    length: int = 1000
    turn: int = 32
    output: int = 8
    conversations: int = 8
    fit: int = 3
    """How many of them the cache holds."""

    @property
    def pages(self) -> int:
        """Of a conversation, at its end."""
        return -(-(self.length + self.turn + self.output) // PAGE_SIZE) + 1


@attrs.frozen(kw_only=True)
class Measurement:
    """The second turns of all conversations on one engine in one round. Times are in seconds."""

    kind: str
    round: int
    ttft_p50: float
    ttft_p99: float
    share_cached: float
    """Of the tokens of those turns, the part that needed no computation."""


def options_of(kind: str, load: Load) -> dict[str, int]:
    """The options of an engine of one kind."""
    held = load.conversations if kind == "all in the cache" else load.fit
    options = {"num_gpu_blocks_override": held * load.pages + 1, "block_size": PAGE_SIZE}
    return options | ({"kv_offloading_bytes": HOST_BYTES} if kind == "copied back" else {})


async def measure(engine: Engine, load: Load, *, kind: str, round: int) -> Measurement:
    """One engine's turn: every conversation begins, and then every one comes back.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(f"offloading {round}")
    histories = [random_ids(rng, load.length) for _ in range(load.conversations)]
    await _ask(engine, histories, load)
    before = engine.statistics().scheduler
    waits = await _ask(engine, [each + random_ids(rng, load.turn) for each in histories], load)
    after = engine.statistics().scheduler
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    return Measurement(
        kind=kind,
        round=round,
        ttft_p50=float(np.percentile(waits, 50)),
        ttft_p99=float(np.percentile(waits, 99)),
        share_cached=(after.prefix_cache_hits - before.prefix_cache_hits) / queries,
    )


async def _ask(engine: Engine, prompts: Sequence[list[int]], load: Load) -> list[float]:
    """Each of ``prompts`` by itself; the seconds until its first token."""
    run = await answer_all(engine, prompts, output=load.output)
    return [record.chunks[0] - record.started for record in run.records]


async def _run(options: argparse.Namespace) -> list[Measurement]:
    load = Load(**{name: getattr(options, name) for name in attrs.asdict(Load())})
    found: list[Measurement] = []
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            kind: await stack.enter_async_context(
                open_engine(
                    options.model,
                    max_model_len=load.pages * PAGE_SIZE,
                    **options_of(kind, load),  # type: ignore[arg-type]
                )
            )
            for kind in KINDS
        }
        for kind, engine in engines.items():
            await measure(engine, attrs.evolve(load, length=64), kind=kind, round=-1)
        for number in range(options.rounds):
            order = KINDS[number % 3 :] + KINDS[: number % 3]
            for kind in order:
                found.append(await measure(engines[kind], load, kind=kind, round=number))
    return found


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: medians over the rounds, and each wait by that of who computes again."""
    heads = ("what becomes of the pages", "tokens found", "TTFT p50 · p99 ms", "TTFT p50, ratio")
    lines = []
    for kind in KINDS:
        own = [m for m in measurements if m.kind == kind]
        ratio = statistics.median(
            one.ttft_p50 / other.ttft_p50
            for one in own
            for other in measurements
            if other.kind == KINDS[0] and other.round == one.round
        )
        lines.append(
            (
                kind,
                f"{statistics.median(m.share_cached for m in own):.0%}",
                f"{statistics.median(m.ttft_p50 for m in own) * 1e3:.1f} · "
                f"{statistics.median(m.ttft_p99 for m in own) * 1e3:.1f}",
                f"{ratio:.3f}",
            )
        )
    return markdown(heads, lines)


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.offloading", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    for name, value in attrs.asdict(Load()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    measurements = trio.run(_run, options)
    show(table(measurements), options.save, "offloading", measurements, options=asked(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
