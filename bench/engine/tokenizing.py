"""Waiting prompts tokenized together, and one by one: ``python -m bench.engine.tokenizing``.

So many prompts of so many tokens come at once. Measured is the time until the last of them has its
ids: in the tokenizer's task, which encodes those that wait as batches, and one after the other in a
thread, as it would be without batches. Both take turns on the same texts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence

import trio

from bench.report import Rounds, markdown, run_script
from bench.servers import exact_prompts, tokenizer
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.request import Request, TextPrompt, Times
from trioserve.requests.request import Sequence as Output
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.text.tokenizer import Tokenizer


async def measure(backend: Tokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Return the milliseconds in the task, and in a thread one by one."""
    to_tokenizer, inbox = trio.open_memory_channel[Request](math.inf)
    to_scheduler, tokenized = trio.open_memory_channel[Request](math.inf)
    requests = [_request(text) for text in texts]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backend.run, inbox, to_scheduler)
        began = time.perf_counter()
        for request in requests:
            to_tokenizer.send_nowait(request)
        to_tokenizer.close()
        count = len([each async for each in tokenized])
        together = time.perf_counter() - began
    assert count == len(texts), "a prompt was refused"
    began = time.perf_counter()
    await trio.to_thread.run_sync(lambda: [backend.encode(text) for text in texts])
    return 1e3 * together, 1e3 * (time.perf_counter() - began)


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


async def compare(options: argparse.Namespace) -> str:
    """Return a table of medians over the rounds."""
    backend, rounds = Tokenizer(tokenizer()), Rounds()
    for number, tokens, prompts in itertools.product(
        range(options.rounds), options.lengths, options.counts
    ):
        texts = exact_prompts(prompts, tokens, f"{number} {tokens}")
        together, alone = await measure(backend, texts)
        rounds.add((tokens, prompts), together=together, alone=alone, ratio=alone / together)
    lines = [
        [prompts, tokens, *(f"{of[name]:.2f}" for name in ("together", "alone", "ratio"))]
        for (tokens, prompts), of in sorted(rounds.medians().items())
    ]
    heads = ["prompts at once", "tokens each", "together ms", "one by one ms", "times faster"]
    return markdown(heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    options = {"counts": [1, 8, 64, 256], "lengths": [64, 256, 1024], "rounds": 7}
    return run_script("tokenizing", compare, arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
