"""Waiting prompts tokenized together, and one by one: ``python -m bench.engine.tokenizing``.

So many prompts of so many tokens come at once. Measured is the time until the last of them has its
ids: in the tokenizer's task, which encodes those that wait as batches, and one after the other in a
thread, as it would be without batches. Both take turns on the same texts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import trio

from bench.micro.cases import make_request
from bench.report import Rounds, in_turns, markdown, script
from bench.servers import exact_prompts, tokenizer
from trioserve.requests.request import Request
from trioserve.requests.stream import StreamBudget
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_task import TokenizerTask


async def measure(backend: Tokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Return the milliseconds in the task, and in a thread one by one."""
    to_tokenizer, inbox = trio.open_memory_channel[Request](math.inf)
    to_scheduler, tokenized = trio.open_memory_channel[Request](math.inf)
    requests = [make_request(text, StreamBudget(1 << 20, 1 << 20)) for text in texts]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(TokenizerTask(backend).run, inbox, to_scheduler)
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


@script
async def compare(
    *,
    counts: Sequence[int] = (1, 8, 64, 256),
    lengths: Sequence[int] = (64, 256, 1024),
    rounds: int = 7,
) -> str:
    """Return a table of medians over the rounds."""
    backend, found = Tokenizer(tokenizer()), Rounds()
    for number, (tokens, prompts) in in_turns(rounds, list(itertools.product(lengths, counts))):
        texts = exact_prompts(prompts, tokens, f"{number} {tokens}")
        together, alone = await measure(backend, texts)
        found.add((tokens, prompts), together=together, alone=alone, ratio=alone / together)
    lines = [
        [prompts, tokens, *(f"{of[name]:.2f}" for name in ("together", "alone", "ratio"))]
        for (tokens, prompts), of in sorted(found.medians().items())
    ]
    heads = ["prompts at once", "tokens each", "together ms", "one by one ms", "times faster"]
    return markdown(heads, lines)
