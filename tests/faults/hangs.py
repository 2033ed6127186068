"""Workers stopped with SIGSTOP under load: how soon is it noticed, and is anything lost?

``python -m tests.faults.hangs``. A stopped process neither dies nor answers. The watchdog gives up
on it ``--watchdog-timeout`` seconds after the oldest plan, and a new worker takes over.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Sequence
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
from trioserve import Engine


async def stop_workers(
    engine: Engine, load: Steady, count: int, seed: int
) -> list[tuple[float, float]]:
    """Stop the worker ``count`` times, each at a random moment after a token.

    Returns the seconds from each SIGSTOP to the end of the stopped process, and to the next token.
    """
    numbers = random.Random(seed)
    pauses = []
    for _ in range(count):
        await load.wait_token()
        await trio.sleep(numbers.uniform(0, 0.3))
        while (worker := sole_worker()) is None:
            await trio.sleep(0.01)
        restarts = engine.statistics().worker_restarts
        stopped = trio.current_time()
        os.kill(worker, signal.SIGSTOP)
        while sole_worker() == worker:
            await trio.sleep(0.01)
        noticed = trio.current_time() - stopped
        await load.wait_token()
        assert engine.statistics().worker_restarts == restarts + 1
        pauses.append((noticed, trio.current_time() - stopped))
    return pauses


async def hangs(model: str, count: int, timeout: float, seed: int) -> tuple[dict[str, Any], bool]:
    """Stop the worker of an engine ``count`` times; return the figures, and whether good."""
    outside = await Holdings.now()
    async with engine_over(model, watchdog_timeout=timeout) as engine:
        load = Steady(engine=engine)
        async with nothing_of_it(engine, load):
            pauses = await stop_workers(engine, load, count, seed)
    await nothing_left(outside, sorts=OUTSIDE)
    figures = {
        "workers stopped": len(pauses),
        "watchdog's timeout, s": timeout,
        **load.figures(),
        "stop to the process's end, p50 · p99 ms": pair([noticed for noticed, _ in pauses]),
        "stop to the next token, p50 · p99 ms": pair([resumed for _, resumed in pauses]),
    }
    return figures, not load.failed and not load.differing


def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    how = (options.stops, options.watchdog_timeout, options.seed)
    with model_named(options.model) as model, own_temporary_folder():
        figures, good = trio.run(hangs, model, *how)
    return verdict_of("hangs", figures, good)


def main(arguments: Sequence[str] | None = None) -> int:
    """Stop workers; return 1 if anything was lost."""
    options = {"model": MODEL, "stops": 20, "watchdog_timeout": 2.0, "seed": 0}
    return run_script("faults_hangs", measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
