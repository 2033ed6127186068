"""A trace replayed over simulated workers: ``python -m tests.engine.routing.replay TRACE``.

Workers are simulated step by step, with the step times of an 8B model on an H200. Each has a cache
of blocks, of which those used last are kept. Each policy gets the same requests at the same times,
a factor quicker than in the trace, so that workers are busy for most of the time. Beside the
policies of the engine are two of other routers, written after their descriptions: Dynamo's cost
(blocks to be computed, and blocks in use) and SGLang's cache-aware choice.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np

from trioserve.engine.routing.policy import KnownPrefix, Loads, Policy, WorkerLoad
from trioserve.scheduler.step_time import StepLoad, StepTimeModel

BLOCK = 512
FIXED, DECODE, TOKEN = 6e-3, 2e-5, 2.7e-5
"""Seconds of a step, of a row that decodes, and of a token of a prompt."""
DECODE_CONTEXT, PROMPT_CONTEXT = 3.3e-8, 6.5e-10
"""Seconds of a token of context: it is read once for a row that decodes, and many rows of a prompt.
"""
LEARNED = 8
"""Steps of which one is learned from."""
MAX_BLOCKS, MAX_TOKENS, MAX_RUNNING = 1600, 2048, 256
HASHED, BOUND = 2, 1.25
"""First blocks that a prefix hash is of, and the load of a worker by the mean load."""


@attrs.frozen
class Asked:
    """A request of the trace."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...]


def read(path: Path, speed: float, most: int) -> list[Asked]:
    """Return the first requests of a trace, ``speed`` times as quick."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:most]]
    return [
        Asked(
            row["timestamp"] / 1000 / speed,
            row["input_length"],
            max(row["output_length"], 1),
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]


@attrs.define(eq=False)
class Worker:
    """A worker with a queue of prompts, streams that decode, and cached blocks."""

    model: StepTimeModel = attrs.field(factory=StepTimeModel)
    cache: OrderedDict[int, None] = attrs.field(factory=OrderedDict)
    prompts: deque[list[float]] = attrs.field(factory=deque)
    """Tokens left of each prompt, tokens with keys, arrival, output, and index."""
    ends: list[tuple[int, int, int]] = attrs.field(factory=list)
    """Step at which each stream ends, its tokens, and its index."""
    ended: list[int] = attrs.field(factory=list)
    """Indices of streams that have ended."""
    step: int = 0
    prompt_tokens: int = 0
    context: int = 0
    free_at: float = 0.0
    busy: float = 0.0

    def cached(self, asked: Asked) -> int:
        """Return the tokens of the prompt whose blocks are cached."""
        count = 0
        for block in asked.blocks:
            if block not in self.cache:
                break
            count += 1
        return min(count * BLOCK, asked.prompt - 1)

    def add(self, index: int, asked: Asked) -> int:
        """Queue a request; return its cached tokens. Its blocks are cached from now on."""
        cached = self.cached(asked)
        for block in asked.blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > MAX_BLOCKS:
            self.cache.popitem(last=False)
        self.prompts.append([asked.prompt - cached, cached, asked.at, asked.output, index])
        self.prompt_tokens += asked.prompt - cached
        return cached

    def run(self, now: float, firsts: list[float]) -> float | None:
        """Compute a step from ``now`` on; return its end, None if there is nothing to do."""
        while self.ends and self.ends[0][0] <= self.step:
            _, length, ended = heapq.heappop(self.ends)
            self.context -= length
            self.ended.append(ended)
        decodes = len(self.ends)
        if not decodes and not self.prompts:
            return None
        room, tokens, context, done = MAX_TOKENS - decodes, 0, 0.0, []
        while self.prompts and room > 0 and decodes + len(done) < MAX_RUNNING:
            prompt = self.prompts[0]
            count = int(min(prompt[0], room))
            context += count * (prompt[1] + count / 2)
            prompt[0] -= count
            prompt[1] += count
            room, tokens = room - count, tokens + count
            if prompt[0] > 0:
                break
            done.append(self.prompts.popleft())
        seconds = FIXED + decodes * DECODE + tokens * TOKEN
        seconds += self.context * DECODE_CONTEXT + context * PROMPT_CONTEXT
        if self.step % LEARNED == 0:
            load = StepLoad(decodes=decodes, prompt_tokens=tokens, context=self.context + context)
            self.model.observe(load, seconds)
        self.prompt_tokens -= tokens
        self.context += decodes
        self.step += 1
        for _, length, at, output, index in done:
            firsts[int(index)] = now + seconds - at
            stream = self.step + int(output) - 1, int(length + output) - 1, int(index)
            heapq.heappush(self.ends, stream)
            self.context += int(length)
        self.busy += seconds
        return now + seconds


Choose = Callable[[Sequence[Worker], Asked], int]


def by_policy(name: str) -> Choose:
    """Return the choice of one of the engine's policies."""
    policy = Policy(name)

    def choose(workers: Sequence[Worker], asked: Asked) -> int:
        loads = [
            WorkerLoad(
                model=each.model,
                prompt_tokens=each.prompt_tokens,
                num_prompts=len(each.prompts),
                num_decodes=len(each.ends),
                context=each.context,
                num_ahead=len(each.prompts) if len(each.ends) >= MAX_RUNNING else 0,
                max_tokens=MAX_TOKENS,
            )
            for each in workers
        ]
        cached = np.array([each.cached(asked) for each in workers])
        return policy.choose(Loads.of(loads), asked.prompt, KnownPrefix(cached=cached))

    return choose


def by_blocks(workers: Sequence[Worker], asked: Asked) -> int:
    """Choose as Dynamo's router: the fewest blocks to be computed and in use."""
    return min(
        range(len(workers)),
        key=lambda i: (
            (workers[i].prompt_tokens + asked.prompt - workers[i].cached(asked)) / BLOCK
            + workers[i].context / BLOCK
        ),
    )


def cache_aware(workers: Sequence[Worker], asked: Asked) -> int:
    """Choose as SGLang's router: the longest prefix, unless the loads are too different."""
    loads = [len(each.ends) + len(each.prompts) for each in workers]
    if max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads):
        return loads.index(min(loads))
    cached = [each.cached(asked) for each in workers]
    if max(cached) > 0.5 * asked.prompt:
        return cached.index(max(cached))
    sizes = [len(each.cache) for each in workers]
    return sizes.index(min(sizes))


def by_prefix_hash(workers: Sequence[Worker], asked: Asked) -> int:
    """Choose by a hash of the prompt's first blocks, with bounded loads.

    The next worker by the hash gets the request if one has more than 1.25 times the mean load.
    """
    key = " ".join(map(str, asked.blocks[:HASHED]))
    order = sorted(range(len(workers)), key=lambda i: zlib.crc32(f"{key} {i}".encode()))
    loads = [len(each.ends) + len(each.prompts) for each in workers]
    most = math.ceil(BOUND * (sum(loads) + 1) / len(workers))
    return next(i for i in order if loads[i] < most)


@attrs.define(eq=False)
class Simulation:
    """Workers in virtual time, and the requests of a trace that they were given."""

    trace: Sequence[Asked]
    workers: list[Worker]
    firsts: list[float] = attrs.field(init=False)
    """Seconds to the first token of each request."""
    _events: list[tuple[float, int]] = attrs.field(init=False, factory=list)
    _idle: set[int] = attrs.field(init=False)
    end: float = attrs.field(init=False, default=0.0)
    """Time of the last step's end."""
    _hits: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.firsts = [0.0] * len(self.trace)
        self._idle = set(range(len(self.workers)))

    def until(self, now: float) -> list[int]:
        """Compute the steps before a time; return the requests that have ended."""
        while self._events and self._events[0][0] <= now:
            self.end, worker = heapq.heappop(self._events)
            self._run(self.end, worker)
        ended = [index for each in self.workers for index in each.ended]
        for each in self.workers:
            each.ended.clear()
        return ended

    def add(self, index: int, worker: int) -> None:
        """Give a request to a worker."""
        asked = self.trace[index]
        self._hits += self.workers[worker].add(index, asked)
        if worker in self._idle:
            self._idle.remove(worker)
            self._run(asked.at, worker)

    def _run(self, now: float, worker: int) -> None:
        end = self.workers[worker].run(now, self.firsts)
        if end is None:
            self._idle.add(worker)
        else:
            heapq.heappush(self._events, (end, worker))

    def figures(self) -> dict[str, float]:
        """Return quantiles of the times to the first token in seconds, and the share of hits."""
        p50, p90, p99 = np.quantile(self.firsts, (0.5, 0.9, 0.99))
        busy = sum(each.busy for each in self.workers) / (len(self.workers) * self.end)
        share = self._hits / sum(each.prompt for each in self.trace)
        times = {"p50": float(p50), "p90": float(p90), "p99": float(p99)}
        return {**times, "hits": share, "busy": busy}


def replay(trace: Sequence[Asked], count: int, choose: Choose) -> dict[str, float]:
    """Return the figures of the requests on ``count`` workers."""
    simulation = Simulation(trace, [Worker() for _ in range(count)])
    for index, asked in enumerate(trace):
        simulation.until(asked.at)
        simulation.add(index, choose(simulation.workers, asked))
    simulation.until(math.inf)
    return simulation.figures()


def speed_for(trace: Sequence[Asked], count: int, load: float) -> float:
    """Return by how much quicker a trace has to be for so much load, as a share of the most.

    The most is the rate at which ``count`` workers compute all requests if these are there at once,
    and are given to the workers in turns.
    """
    at_once = [attrs.evolve(each, at=0.0) for each in trace]
    simulation = Simulation(at_once, [Worker() for _ in range(count)])
    for index in range(len(trace)):
        simulation.add(index, index % count)
    simulation.until(math.inf)
    return load * (trace[-1].at - trace[0].at) / simulation.end


def endless_hits(trace: Sequence[Asked]) -> float:
    """Return the share of prompts' tokens that one endless cache would have."""
    seen: set[int] = set()
    hits = 0
    for asked in trace:
        known = itertools.takewhile(seen.__contains__, asked.blocks)
        hits += min(sum(1 for _ in known) * BLOCK, asked.prompt - 1)
        seen.update(asked.blocks)
    return hits / sum(each.prompt for each in trace)


POLICIES: dict[str, Callable[[], Choose]] = {
    **{
        name: (lambda name=name: by_policy(name))  # type: ignore[misc]
        for name in ("predicted", "prefix", "least_loaded", "round_robin")
    },
    "Dynamo's cost": lambda: by_blocks,
    "SGLang's cache-aware": lambda: cache_aware,
    "prefix hash": lambda: by_prefix_hash,
}


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=1 << 30)
    options = parser.parse_args()
    trace = read(options.trace, options.speed, options.requests)
    print("| policy | TTFT p50 s | p90 s | p99 s | prompt tokens cached | busy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, make in POLICIES.items():
        found = replay(trace, options.workers, make())
        times = " | ".join(f"{found[each]:.3f}" for each in ("p50", "p90", "p99"))
        print(f"| {name} | {times} | {found['hits']:.1%} | {found['busy']:.0%} |", flush=True)
    print(f"| one endless cache | | | | {endless_hits(trace):.1%} | |")


if __name__ == "__main__":
    main()
