"""Requests to engines whose workers are several processes, and these processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import trio

from tests.support.engines import worker_of
from tests.support.process_faults import cut_off
from trioserve import Completion, Engine, Grammar

__all__ = [
    "WAYS_TO_LOSE",
    "adapted",
    "answers",
    "assert_gone",
    "assert_noticed",
    "logprobs_of",
    "prompt",
    "ranks_of",
    "tokens_of",
]

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.5, "seed": 1, "n": 2},
    {"temperature": 0.7, "seed": 2, "grammar": Grammar("regex", "(ab|cd|e){8}")},
    {"temperature": 0, "beam_width": 3, "n": 2},
    {"temperature": 0, "prompt_logprobs": 1},
]
WAYS_TO_LOSE: dict[str, Callable[[psutil.Process], None]] = {
    "killed": psutil.Process.kill,
    "stopped": psutil.Process.suspend,
    "cut off": lambda rank: cut_off(rank.pid),
}
"""Ways to lose a rank behind rank 0; no signal is needed for the last one."""


def prompt(number: int) -> list[int]:
    return [3 + (number * 11 + place * place) % 290 for place in range(6 + 9 * number)]


async def answers(engine: Engine) -> list[Completion]:
    """Return the answers to all requests, computed together."""
    found: dict[int, Completion] = {}

    async def ask(number: int) -> None:
        options = {"max_tokens": 16, "ignore_eos": True, **REQUESTS[number]}
        found[number] = await engine.complete(prompt(number), **options)

    async with trio.open_nursery() as nursery:
        for number in range(len(REQUESTS)):
            nursery.start_soon(ask, number)
    return [found[number] for number in range(len(REQUESTS))]


def tokens_of(answer: Completion) -> list[tuple[int, ...]]:
    return [tuple(each.token_ids) for each in answer.outputs]


def logprobs_of(answer: Completion) -> list[float]:
    """Return the log-probabilities of the first output and of the prompt, as far as asked for."""
    found = [each.logprob for each in answer.outputs[0].logprobs or ()]
    if answer.prompt_logprobs is not None:
        entries = answer.prompt_logprobs.entries(list(answer.prompt_token_ids))
        found += [each.logprob for each in entries]
    return found


async def adapted(engine: Engine, *adapters: str) -> list[tuple[int, ...]]:
    """Return the outputs of a request with each of ``adapters``, empty for none, side by side."""
    found: dict[int, tuple[int, ...]] = {}

    async def ask(place: int) -> None:
        options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        answer = await engine.complete(prompt(place), adapter=adapters[place], **options)
        found[place] = tuple(answer.token_ids)

    async with trio.open_nursery() as nursery:
        for place in range(len(adapters)):
            nursery.start_soon(ask, place)
    return [found[place] for place in range(len(adapters))]


async def ranks_of(engine: Engine) -> list[psutil.Process]:
    """Return the processes of the ranks behind rank 0."""
    return [each for each in (await worker_of(engine)).children() if "--rank" in each.cmdline()]


async def assert_gone(processes: list[psutil.Process]) -> None:
    with trio.fail_after(10):
        while any(each.is_running() and each.status() != "zombie" for each in processes):
            await trio.sleep(0.01)


async def assert_noticed(engine: Engine, way: str) -> None:
    """Lose the last rank while nothing is computed: the worker ends within a second."""
    processes = [await worker_of(engine), *await ranks_of(engine)]
    WAYS_TO_LOSE[way](processes[-1])
    with trio.fail_after(1):
        await assert_gone(processes)
    assert (await engine.complete(prompt(0), max_tokens=3, ignore_eos=True)).token_ids
    (report,) = engine.workers
    assert "was killed by signal 9" in str(report.last_loss)
