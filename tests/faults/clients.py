"""Clients that leave at random moments, 500 at once: is anything left of them?

``python -m tests.faults.clients``. Every round, so many clients come at once to a server of this
program with a real worker. Each leaves in a stage and in a manner (:mod:`tests.faults.leaving`)
that are drawn for it. Beside them others stay, and have to get exactly what they get alone.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio

from bench.report import Made, run_script
from tests.faults.leaving import MANNERS, STAGES, Visit
from tests.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_held,
    nothing_left,
    nothing_of_it,
    own_temporary_folder,
)
from tests.faults.load import Steady, texts
from tests.faults.stage import engine_over, model_named, resident_bytes, serve_here, verdict_of

_PATIENCE = 170.0
_PAGES = 1024
"""Few, so that the prefix cache is full after the first crowd and grows no more."""


def _visits(port: int, count: int, numbers: random.Random) -> list[Visit]:
    """Return ``count`` clients, of every stage in every manner, in random order."""
    short, long = texts(numbers, 1, 20), texts(numbers, 100, 300)
    visits = []
    for index in range(count):
        fields = {
            "prompt": next(long if numbers.random() < 0.3 else short),
            "max_tokens": numbers.randint(100, 1000),
            "n": numbers.choice((1, 1, 1, 3)),
            "ignore_eos": True,
        }
        visit = Visit(
            port=port,
            fields=fields,
            stage=STAGES[index // len(MANNERS) % len(STAGES)],
            manner=MANNERS[index % len(MANNERS)],
            events=numbers.randint(1, 30),
            patience=numbers.uniform(0.0, 1.0),
        )
        visits.append(visit)
    numbers.shuffle(visits)
    return visits


async def crowd(port: int, count: int, seed: int, *, spread: float = 0.0) -> Counter[int]:
    """Have ``count`` clients come within ``spread`` seconds and leave.

    Returns the statuses that they were told, 0 for none.
    """
    numbers = random.Random(seed)
    visits = _visits(port, count, numbers)

    async def come(visit: Visit, after: float) -> None:
        await trio.sleep(after)
        await visit.run()

    with trio.fail_after(_PATIENCE):
        async with trio.open_nursery() as nursery:
            for visit in visits:
                nursery.start_soon(come, visit, numbers.uniform(0.0, spread))
    return Counter(visit.status for visit in visits)


async def clients(model: str, rounds: int, count: int, seed: int) -> tuple[dict[str, Any], bool]:
    """Have ``rounds`` crowds come to ``model``; return the figures, and whether they are good."""
    outside = await Holdings.now()
    statuses: Counter[int] = Counter()
    async with engine_over(model, num_gpu_blocks_override=_PAGES) as engine:
        # The first crowd makes Python and the C library ask for the memory that they need.
        async with serve_here(engine) as port:
            await crowd(port, count, seed)
        await nothing_held(engine)
        # Resident memory of this program, which is server and clients in one.
        load, memory = Steady(engine=engine, clients=4), resident_bytes(os.getpid())
        async with nothing_of_it(engine, load), serve_here(engine) as port:
            for number in range(rounds):
                statuses += await crowd(port, count, seed + number)
        grown = resident_bytes(os.getpid()) - memory
    await nothing_left(outside, sorts=OUTSIDE)
    figures = {
        "clients that left": f"{rounds * count}, {count} at once",
        "statuses they were told": dict(sorted(statuses.items())),
        **{f"neighbors' {name}": figure for name, figure in load.figures().items()},
        "left of them": "nothing",
        "memory grown, MiB": round(grown / (1 << 20), 1),
    }
    return figures, not load.failed and not load.differing


def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    how = (options.rounds, options.at_once, options.seed)
    with model_named("tiny") as model, own_temporary_folder():
        figures, good = trio.run(clients, model, *how)
    return verdict_of("clients", figures, good)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have crowds come and leave; return 1 if the others noticed."""
    return run_script("faults_clients", measure, arguments, rounds=20, at_once=500, seed=0)


if __name__ == "__main__":
    raise SystemExit(main())
