"""Workers stopped with SIGSTOP under load: how soon is it noticed, and is anything lost?

``python -m bench.faults.hangs``. A stopped process neither dies nor answers. The watchdog gives up
on it ``--watchdog-timeout`` seconds after the oldest plan, and a new worker takes over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_held,
    nothing_left,
    own_temporary_folder,
)
from bench.faults.results import RESULTS, markdown, save, spread
from bench.faults.stage import engine_over, sole_worker, tiny_model
from bench.faults.steady import Steady
from bench.servers import MODEL
from trioserve import Engine


@attrs.frozen(kw_only=True)
class Pause:
    """Seconds from a SIGSTOP to the end of the stopped process, and to the next token."""

    noticed: float
    next_token: float


async def stop_workers(engine: Engine, load: Steady, count: int, seed: int) -> list[Pause]:
    """Stop the worker ``count`` times, each at a random moment after a token."""
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
        noticed = trio.current_time()
        await load.wait_token()
        assert engine.statistics().worker_restarts == restarts + 1
        pauses.append(
            Pause(noticed=noticed - stopped, next_token=trio.current_time() - stopped),
        )
    return pauses


async def hangs(model: str, count: int, timeout: float, seed: int) -> dict[str, Any]:
    """Stop the worker of an engine over ``model`` ``count`` times; the figures."""
    outside = await Holdings.now()
    async with engine_over(model, watchdog_timeout=timeout) as engine:
        load = Steady(engine=engine)
        await load.learn()
        await nothing_held(engine)
        before = await Holdings.now()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            pauses = await stop_workers(engine, load, count, seed)
            load.end()
        await nothing_held(engine)
        await nothing_left(before)
    await nothing_left(outside, sorts=OUTSIDE)
    return {
        "stops": len(pauses),
        "watchdog_timeout": timeout,
        "requests_answered": load.answered,
        "requests_lost": sum(load.failed.values()),
        "lost": dict(load.failed),
        "answers_that_differ": load.differing,
        "stop_to_its_end": spread([pause.noticed for pause in pauses]),
        "stop_to_next_token": spread([pause.next_token for pause in pauses]),
        "passed": not load.failed and not load.differing,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    noticed, resumed = figures["stop_to_its_end"], figures["stop_to_next_token"]
    rows = [
        ("workers stopped", figures["stops"]),
        ("watchdog's timeout, s", figures["watchdog_timeout"]),
        ("requests answered", figures["requests_answered"]),
        ("requests lost", figures["requests_lost"]),
        ("answers that differ", figures["answers_that_differ"]),
        ("stop to the process's end, p50 · p99 ms", f"{noticed['p50_ms']} · {noticed['p99_ms']}"),
        ("stop to the next token, p50 · p99 ms", f"{resumed['p50_ms']} · {resumed['p99_ms']}"),
    ]
    return markdown(("hangs", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Stop workers, print the table and save the record. 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.hangs", description=__doc__)
    parser.add_argument("--model", default=MODEL, help='or "tiny", a small random one')
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--watchdog-timeout", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        model = given.model
        if model == "tiny":
            model = tiny_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(own_temporary_folder())
        figures = trio.run(hangs, model, given.stops, given.watchdog_timeout, given.seed)
    print(table(figures))
    print(f"saved {save(RESULTS, 'hangs', vars(given), figures)}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
