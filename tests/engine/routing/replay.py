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
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
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
    ends: list[tuple[int, int]] = attrs.field(factory=list)
    """Step at which each stream ends, and its tokens."""
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
            self.context -= heapq.heappop(self.ends)[1]
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
            heapq.heappush(self.ends, (self.step + int(output) - 1, int(length + output) - 1))
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


def replay(trace: Iterable[Asked], count: int, choose: Choose) -> dict[str, float]:
    """Return quantiles of the times to the first token in seconds, and the share of hits."""
    workers = [Worker() for _ in range(count)]
    requests = list(trace)
    firsts = [0.0] * len(requests)
    events: list[tuple[float, int]] = []
    idle = set(range(count))
    hits = 0

    def advance(now: float, worker: int) -> None:
        end = workers[worker].run(now, firsts)
        if end is None:
            idle.add(worker)
        else:
            heapq.heappush(events, (end, worker))

    for index, asked in enumerate(requests):
        while events and events[0][0] <= asked.at:
            advance(*heapq.heappop(events))
        chosen = choose(workers, asked)
        hits += workers[chosen].add(index, asked)
        if chosen in idle:
            idle.remove(chosen)
            advance(asked.at, chosen)
    end = 0.0
    while events:
        end, worker = heapq.heappop(events)
        advance(end, worker)
    p50, p90, p99 = np.quantile(firsts, (0.5, 0.9, 0.99))
    busy = sum(each.busy for each in workers) / (count * end)
    share = hits / sum(each.prompt for each in requests)
    return {"p50": p50, "p90": p90, "p99": p99, "hits": share, "busy": busy}


POLICIES: dict[str, Callable[[], Choose]] = {
    **{
        name: (lambda name=name: by_policy(name))  # type: ignore[misc]
        for name in ("predicted", "prefix", "least_loaded", "round_robin")
    },
    "Dynamo's cost": lambda: by_blocks,
    "SGLang's cache-aware": lambda: cache_aware,
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


if __name__ == "__main__":
    main()
