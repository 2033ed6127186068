"""Engines for the tests, and what must be true of one that has nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import trio

from tests.faults.leftovers import nothing_held
from trioserve import Engine, open_engine

__all__ = ["assert_idle", "facts_of", "open_compiled_engine", "open_tiny_engine", "worker_of"]


@contextlib.asynccontextmanager
async def open_tiny_engine(folder: Path, **options: Any) -> AsyncIterator[Engine]:
    """Open a real engine with a real worker process over a tiny model in ``folder``."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, **options}
    async with open_engine(str(folder), **options) as engine:
        yield engine


def open_compiled_engine(
    folder: Path, **options: Any
) -> contextlib.AbstractAsyncContextManager[Engine]:
    """Open an engine whose worker has the compiled kernels, if there are any for this machine.

    It starts a few times as fast as one that imports torch. Heads must have 32 numbers, or a
    multiple of that.
    """
    return open_tiny_engine(folder, **{"dtype": "auto", **options})


async def assert_idle(engine: Engine, *, within: float = 10.0) -> None:
    """Wait until the engine has nothing to do, then assert that nothing is held anywhere."""
    await nothing_held(engine, within=within)


async def worker_of(engine: Engine) -> psutil.Process:
    """Return the engine's worker process, once there is one that runs."""
    while (pid := engine.worker_life().pid) is None:
        await trio.sleep(0.001)
    return psutil.Process(pid)


async def facts_of(
    engine: Engine, kinds: Sequence[dict[str, Any]], count: int, *, max_tokens: int
) -> list[Any]:
    """Return tokens and log-probabilities of ``count`` requests at a time, of each kind in turn."""
    found: dict[int, Any] = {}

    async def ask(number: int) -> None:
        fields = {"max_tokens": max_tokens, "seed": number, **kinds[number % len(kinds)]}
        completion = await engine.complete([7 + number, 9, 4] * 5, **fields)
        found[number] = [
            (each.token_ids, [one.logprob for one in each.logprobs or ()])
            for each in completion.outputs
        ]

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(ask, number)
    return [found[number] for number in range(count)]
