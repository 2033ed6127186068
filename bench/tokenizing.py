"""What it brings that the tokenizer takes what waits together: ``python -m bench.tokenizing``.

So many prompts of so many tokens come at once. Measured is the time until the last of them has its
ids: in the tokenizer's task, which encodes those that wait as batches, and one after the other in a
thread, as it would be without them. Both take turns on the same texts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from bench.prompts import exact_prompts, tokenizer
from bench.report import asked, markdown, show
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.request import Request, TextPrompt, Times
from trioserve.requests.request import Sequence as Output
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.text.tokenizer import Tokenizer

__all__ = ["Measurement", "main", "measure", "table"]

COUNTS = (1, 8, 64, 256)
LENGTHS = (64, 256, 1024)


@attrs.frozen(kw_only=True)
class Measurement:
    """One crowd in one round: seconds until the last prompt has its ids."""

    prompts: int
    tokens: int
    round: int
    together: float
    one_by_one: float


async def measure(backend: Tokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Seconds in the task, and in a thread one by one."""
    to_tokenizer, inbox = trio.open_memory_channel[Request](math.inf)
    to_scheduler, tokenized = trio.open_memory_channel[Request](math.inf)
    requests = [_request(text) for text in texts]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backend.run, inbox, to_scheduler)
        began = time.perf_counter()
        for request in requests:
            to_tokenizer.send_nowait(request)
        to_tokenizer.close()
        count = 0
        async for _ in tokenized:
            count += 1
        together = time.perf_counter() - began
    assert count == len(texts), "a prompt was refused"

    def encode_all() -> None:
        for text in texts:
            backend.encode(text)

    began = time.perf_counter()
    await trio.to_thread.run_sync(encode_all)
    return together, time.perf_counter() - began


def _request(text: str) -> Request:
    request = Request(
        id="crowd",
        prompt=TextPrompt(text),
        params=SamplingParams(),
        stream=Stream(StreamBudget(1 << 20, 1 << 20)),
        times=Times(arrived=0.0),
    )
    request.sequences.append(Output(request=request, index=0, sampler=SamplerParams()))
    return request


async def _run(options: argparse.Namespace) -> list[Measurement]:
    backend = Tokenizer(tokenizer())
    found = []
    for number, tokens, prompts in itertools.product(
        range(options.rounds), options.lengths, options.counts
    ):
        texts = exact_prompts(backend.backend, prompts, tokens, f"{number} {tokens}")
        together, one_by_one = await measure(backend, texts)
        found.append(
            Measurement(
                prompts=prompts,
                tokens=tokens,
                round=number,
                together=together,
                one_by_one=one_by_one,
            )
        )
    return found


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: medians over the rounds."""
    heads = ("prompts at once", "tokens each", "together ms", "one by one ms", "times faster")
    lines = []
    for (tokens, prompts), group in itertools.groupby(
        sorted(measurements, key=_key_of), key=_key_of
    ):
        each = list(group)
        together = statistics.median(m.together for m in each)
        one_by_one = statistics.median(m.one_by_one for m in each)
        ratio = statistics.median(m.one_by_one / m.together for m in each)
        times = (f"{together * 1e3:.2f}", f"{one_by_one * 1e3:.2f}")
        lines.append((str(prompts), str(tokens), *times, f"{ratio:.2f}"))
    return markdown(heads, lines)


def _key_of(m: Measurement) -> tuple[int, int]:
    return m.tokens, m.prompts


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.tokenizing", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    measurements = trio.run(_run, options)
    show(table(measurements), options.save, "tokenizing", measurements, options=asked(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
