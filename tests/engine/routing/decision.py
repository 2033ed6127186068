"""The router's choice of a worker: ``python -m tests.engine.routing.decision``.

Prompts go on with conversations that some worker has cached, for three quarters of their length;
conversations share one of a few system prompts. Each worker has sequences that decode, and 256
placed prompts that aren't computed yet. The figures are medians of processor time. In brackets is
that of the prompt's encoding, which isn't part of a decision: it is done where the prompt is
tokenized, once for the router, the prefix cache and the message to the worker.

The trees are real. A thousand trees of 100,000 pages don't fit here, so those of many workers are
smaller; the rows of 8 workers show what the size matters.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Sequence

import attrs
import numpy as np

from bench.micro.cases import PAGE_SIZE, Loop, make_request
from bench.report import Made, Verdict, markdown, script
from trioserve.config import EngineConfig
from trioserve.engine.routing.policy import Policy
from trioserve.engine.routing.router import Router
from trioserve.protocol.wire import from_ints, ints
from trioserve.requests.request import Request
from trioserve.requests.stream import StreamBudget
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_index import PrefixIndex, WorkerPages
from trioserve.scheduler.scheduler import Scheduler

NUM_DECODES = 16
COMING = 256
"""Prompts placed on each worker that aren't computed yet."""
SYSTEM_PROMPTS, SYSTEM_TOKENS, CONVERSATION_TOKENS = 4, 1024, 8192
TARGETS = {8: 50.0, 1000: 200.0}
"""Workers to the microseconds that a decision may take at the median of all lengths."""


@attrs.define(eq=False)
class Cluster:
    """Workers in the midst of their work, and a router over them."""

    loops: list[Loop]
    router: Router
    conversations: list[bytes]
    rng: np.random.Generator

    @classmethod
    def of(cls, workers: int, pages: int) -> Cluster:
        """Return workers with as many cached pages each."""
        rng = np.random.default_rng(1)
        systems = [_tokens(rng, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        cluster = cls([], Router(Policy()), [], rng)
        for _ in range(workers):
            scheduler = Scheduler(EngineConfig("bench"))
            loop = Loop.of(NUM_DECODES, pages + 64 * NUM_DECODES, scheduler.feeds)
            scheduler._core = loop.core
            scheduler._worker_attached.set()
            cluster.router.add(scheduler)
            cluster.loops.append(loop)
            prefix = loop.core.memory.prefix
            for number in itertools.count():
                left = pages - prefix.num_nodes
                if left <= 0:
                    break
                system = systems[number % SYSTEM_PROMPTS]
                tokens = system + _tokens(rng, CONVERSATION_TOKENS - SYSTEM_TOKENS)
                publish(prefix, tokens[: (SYSTEM_TOKENS // PAGE_SIZE + left) * PAGE_SIZE])
                cluster.conversations.append(from_ints(tokens))
        cluster.router.place(cluster.request(500))
        for number in range(workers):
            for system in itertools.islice(itertools.cycle(systems), COMING):
                tokens = from_ints(system + _tokens(rng, 512))
                cluster.router._index.add_coming(("",), PAGE_SIZE, tokens, 2 * number)
        return cluster

    def request(self, length: int) -> Request:
        """Return a request that goes on with a conversation."""
        conversation = self.conversations[self.rng.integers(len(self.conversations))]
        known = ints(conversation)[: length * 3 // 4].tolist()
        return make_request(known + _tokens(self.rng, length - len(known)), StreamBudget(0, 0))

    def decisions(self, length: int, count: int) -> list[tuple[float, float]]:
        """Return the microseconds of decisions, and those for the prompt's column before them."""
        taken = []
        for request in [self.request(length) for _ in range(count)]:
            began = time.process_time_ns()
            request.prompt_column()
            between = time.process_time_ns()
            self.router.place(request)
            ended = time.process_time_ns()
            request.coming.end()
            taken.append(((ended - between) / 1000, (between - began) / 1000))
        return taken

    def reading(self) -> float:
        """Return the microseconds for which the load of a worker is read after a step."""
        for loop in self.loops:
            plan = loop.next_plan()
            loop.core.on_result(loop.answer_to(plan.number), loop.now)
            loop.core.feeds.note_load()
        began = time.process_time_ns()
        self.router._update()
        return (time.process_time_ns() - began) / 1000 / len(self.loops)


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(300, 49000, count).tolist()  # type: ignore[no-any-return]


def publish(cache: PrefixCache, tokens: list[int]) -> None:
    """Have a sequence of these tokens computed."""
    match = cache.match(("",), from_ints(tokens), 0, len(tokens))
    cache.pool.share(match.pages)
    count = len(tokens) // PAGE_SIZE
    pages = match.pages + cache.pool.allocate(count - len(match.pages))
    cursor = cache.publish(("",), match.nodes[-1] if match.nodes else None, tokens, pages, count, 0)
    cache.pool.release(cache.leave(("",), cursor, tokens, pages, count), 0)


def page_costs(pages: int) -> list[list[object]]:
    """Return the bytes and microseconds of a page in a tree, and of one that is also indexed."""
    lines: list[list[object]] = []
    for what in ("in the tree of its worker", "and in the index over all workers"):
        rng, taken = np.random.default_rng(1), []
        for traced in (False, True):
            cache = PrefixCache(PagePool(pages), PAGE_SIZE)
            if lines:
                cache.join(WorkerPages(PrefixIndex(), 0))
            if traced:
                tracemalloc.start()  # A tree might keep the prompts' numbers.
            prompts = [_tokens(rng, CONVERSATION_TOKENS) for _ in range(pages // 512)]
            began = time.process_time()
            while prompts:
                publish(cache, prompts.pop())
            taken.append((time.process_time() - began) / cache.num_nodes)
            if traced:
                size = tracemalloc.get_traced_memory()[0] / cache.num_nodes
                tracemalloc.stop()
        lines.append([what, f"{size:.0f}", f"{taken[0] * 1e6:.1f}"])
    return lines


@script
def measure(
    *,
    workers: Sequence[int] = (8, 8, 1000),
    pages: Sequence[int] = (1000, 100_000, 1000),
    lengths: Sequence[int] = (500, 1000, 2000, 4000, 8000),
    decisions: int = 200,
) -> Made:
    """Return the times of decisions, and what a cached page costs."""
    lines, verdicts = [], []
    for number, size in zip(workers, pages, strict=True):
        cluster = Cluster.of(number, size)
        gc.collect()
        gc.freeze()
        found = {each: cluster.decisions(each, decisions) for each in lengths}
        medians = [
            [statistics.median(each) for each in zip(*found[length], strict=True)]
            for length in lengths
        ]
        every = statistics.median(us for figures in found.values() for us, _ in figures)
        cells = [f"{whole:.0f} ({column:.0f})" for whole, column in medians]
        reading = statistics.median(cluster.reading() for _ in range(9))
        lines.append([number, f"{size:,}", *cells, f"{every:.0f}", f"{reading:.1f}"])
        if number in TARGETS:
            what = f"a decision at {number:,} workers with {size:,} pages"
            verdict = Verdict(what=what, against="", bound=TARGETS[number], reached=every,
                              at_most=True, unit="µs")  # fmt: skip
            verdicts.append(attrs.asdict(verdict))
        del cluster
        gc.unfreeze()
    heads = [
        "workers",
        "pages each",
        *(f"{each:,} tokens" for each in lengths),
        "all",
        "a changed load",
    ]
    costs = markdown(["a cached page", "bytes", "µs to add"], page_costs(51_200))
    return Made(f"{markdown(heads, lines)}\n\n{costs}", {"verdicts": verdicts})
