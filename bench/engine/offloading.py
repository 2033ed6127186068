"""Conversations that come back after their pages have gone: ``python -m bench.engine.offloading``.

Eight conversations of 1,000 tokens take turns, in a KV cache that holds three of them. When one
comes back, an engine without memory on the host computes it again, one with such memory copies its
pages back, and one whose cache holds all of them finds them where they were, which is the best that
can be had. The three take turns, with conversations that are new to all in each round. On a CPU the
host's memory is the same memory, so that this shows the cost of copying and its bookkeeping.
"""

from __future__ import annotations

import contextlib
import random

import attrs

from bench.engine import answer_all, random_ids
from bench.report import Rounds, in_turns, markdown, script
from bench.servers import MODEL
from trioserve import Engine, open_engine
from trioserve.load import figures_of

KINDS = ("computed again", "copied back", "all in the cache")
PAGE_SIZE, HOST_BYTES = 16, 1 << 30


@attrs.frozen(kw_only=True)
class Load:
    """The conversations, in tokens; the cache has room for ``fit`` of them."""

    length: int = 1000
    turn: int = 32
    output: int = 8
    conversations: int = 8
    fit: int = 3

    @property
    def pages(self) -> int:
        """The pages of a conversation at its end."""
        return -(-(self.length + self.turn + self.output) // PAGE_SIZE) + 1


def options_of(kind: str, load: Load) -> dict[str, int]:
    """Return the options of an engine of one kind."""
    held = load.conversations if kind == "all in the cache" else load.fit
    options = {"num_gpu_blocks_override": held * load.pages + 1, "block_size": PAGE_SIZE}
    return options | ({"kv_offloading_bytes": HOST_BYTES} if kind == "copied back" else {})


async def measure(engine: Engine, load: Load, round: int) -> dict[str, float]:
    """Have every conversation begin, then come back: its waits, and the share of cached tokens."""
    rng = random.Random(f"offloading {round}")
    histories = [random_ids(rng, load.length) for _ in range(load.conversations)]
    await answer_all(engine, histories, output=load.output)
    turns = [each + random_ids(rng, load.turn) for each in histories]
    figures = figures_of(await answer_all(engine, turns, output=load.output))
    cached = figures.cached_tokens / figures.prompt_tokens
    return {"p50": figures.ttft_ms.p50, "p99": figures.ttft_ms.p99, "cached": cached}


@script
async def compare(*, model: str = MODEL, rounds: int = 6) -> str:
    """Return a table of medians over the rounds, and each wait's ratio to computing again."""
    load, found = Load(), Rounds()
    async with contextlib.AsyncExitStack() as stack:
        engines = {}
        for kind in KINDS:
            limits = options_of(kind, load)
            opening = open_engine(model, max_model_len=load.pages * PAGE_SIZE, **limits)
            engines[kind] = await stack.enter_async_context(opening)
            await measure(engines[kind], attrs.evolve(load, length=64), -1)
        for number, kind in in_turns(rounds, KINDS):
            found.add(kind, **await measure(engines[kind], load, number))
    lines = []
    for kind, of in found.medians().items():
        waits = f"{of['p50']:.1f} · {of['p99']:.1f}"
        ratio = found.ratio(kind, KINDS[0], "p50")
        lines.append([kind, f"{of['cached']:.0%}", waits, f"{ratio:.3f}"])
    heads = ["what becomes of the pages", "tokens found", "TTFT p50 · p99 ms", "TTFT p50, ratio"]
    return markdown(heads, lines)
