"""Workers that stop or hang under load: how soon is it noticed, and is anything lost?

``python -m tests.faults.hangs``. A process that is stopped with SIGSTOP neither dies nor answers,
and the kernel tells its parent. A process whose main thread hangs does neither, and tells nothing:
the watchdog gives up on it ``--watchdog-timeout`` seconds after the oldest plan. Then a new worker
takes over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import trio

from bench.report import Made, run_script
from bench.servers import MODEL
from tests.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_left,
    nothing_of_it,
    own_temporary_folder,
)
from tests.faults.load import Steady
from tests.faults.stage import engine_over, model_named, pair, sole_worker, verdict_of
from tests.support.process_faults import hung
from trioserve import Engine


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, which the block waits for to be killed."""
    os.kill(pid, signal.SIGSTOP)
    yield


FAULTS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "stopped": stopped,
    "hung": hung,
}
"""Faults of a process, each for a block in which the engine has to end it."""


async def disturb_workers(
    engine: Engine, load: Steady, fault: str, count: int, seed: int
) -> list[tuple[float, float]]:
    """Do ``fault`` to the worker ``count`` times, each at a random moment after a token.

    Returns the seconds from each fault to the end of the process, and to the next token.
    """
    numbers = random.Random(seed)
    pauses = []
    for _ in range(count):
        await load.wait_token()
        await trio.sleep(numbers.uniform(0, 0.3))
        while (worker := sole_worker()) is None:
            await trio.sleep(0.01)
        restarts = engine.statistics().worker_restarts
        began = trio.current_time()
        with FAULTS[fault](worker):
            while sole_worker() == worker:
                await trio.sleep(0.01)
        noticed = trio.current_time() - began
        await load.wait_token()
        assert engine.statistics().worker_restarts == restarts + 1
        pauses.append((noticed, trio.current_time() - began))
    return pauses


async def hangs(model: str, count: int, timeout: float, seed: int) -> tuple[dict[str, Any], bool]:
    """Do each fault to an engine's worker ``count`` times; return figures, and whether good."""
    outside = await Holdings.now()
    figures: dict[str, Any] = {"watchdog's timeout, s": timeout}
    async with engine_over(model, watchdog_timeout=timeout) as engine:
        load = Steady(engine=engine)
        async with nothing_of_it(engine, load):
            for fault in FAULTS:
                pauses = await disturb_workers(engine, load, fault, count, seed)
                figures |= {
                    f"workers {fault}": len(pauses),
                    f"{fault} to the process's end, p50 · p99 ms": pair([end for end, _ in pauses]),
                    f"{fault} to the next token, p50 · p99 ms": pair([last for _, last in pauses]),
                }
    await nothing_left(outside, sorts=OUTSIDE)
    return {**figures, **load.figures()}, not load.failed and not load.differing


def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    how = (options.faults, options.watchdog_timeout, options.seed)
    with model_named(options.model) as model, own_temporary_folder():
        figures, good = trio.run(hangs, model, *how)
    return verdict_of("hangs", figures, good)


def main(arguments: Sequence[str] | None = None) -> int:
    """Disturb workers; return 1 if anything was lost."""
    options = {"model": MODEL, "faults": 10, "watchdog_timeout": 2.0, "seed": 0}
    return run_script("faults_hangs", measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
