"""Clients that leave at random moments, 500 at once: is anything left of them?

``python -m bench.faults.clients``. Every round, so many clients come at once to a server of this
program with a real worker. Each leaves in a stage and in a manner (:mod:`bench.faults.leaving`)
that are drawn for it. Beside them others stay, and have to get exactly what they get alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from bench.faults.leaving import MANNERS, STAGES, Visit
from bench.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_held,
    nothing_left,
    own_temporary_folder,
)
from bench.faults.mixture import texts
from bench.faults.processes import footprint
from bench.faults.results import RESULTS, markdown, save
from bench.faults.stage import engine_over, serve_here, tiny_model
from bench.faults.steady import Steady
from trioserve import Engine

_PATIENCE = 170.0
_PAGES = 1024
"""Few, so that the prefix cache is full after the first crowd and grows no more."""
_MIB = 1 << 20


def _visits(port: int, count: int, numbers: random.Random) -> list[Visit]:
    """``count`` clients: every stage in every manner, and then as it comes."""
    short, long = texts(numbers, 1, 20), texts(numbers, 100, 300)
    visits = []
    for index in range(count):
        manner = MANNERS[index % len(MANNERS)]
        stage = STAGES[index // len(MANNERS) % len(STAGES)]
        fields = {
            "prompt": next(long if numbers.random() < 0.3 else short),
            "max_tokens": numbers.randint(100, 1000),
            "n": numbers.choice((1, 1, 1, 3)),
            "ignore_eos": True,
        }
        visits.append(
            Visit(
                port=port,
                fields=fields,
                stage=stage,
                manner=manner,
                events=numbers.randint(1, 30),
                patience=numbers.uniform(0.0, 1.0),
            )
        )
    numbers.shuffle(visits)
    return visits


async def crowd(port: int, count: int, seed: int, *, spread: float = 0.0) -> Counter[int]:
    """``count`` clients come within ``spread`` seconds and leave; the statuses that they were told,
    0 for none.

    Raises:
        trio.TooSlowError: one of them couldn't.
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


async def _rounds(engine: Engine, load: Steady, rounds: int, count: int, seed: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    async with serve_here(engine) as port, trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        for number in range(rounds):
            statuses += await crowd(port, count, seed + number)
        load.end()
    return statuses


async def clients(model: str, rounds: int, count: int, seed: int) -> dict[str, Any]:
    """``rounds`` crowds of ``count`` clients over ``model``; the figures.

    Raises:
        Leftovers: something of them was left.
    """
    outside = await Holdings.now()
    async with engine_over(model, num_gpu_blocks_override=_PAGES) as engine:
        load = Steady(engine=engine, clients=4)
        await load.learn()
        # The first crowd makes Python and the C library ask for what they need of memory.
        await _rounds(engine, Steady(engine=engine, clients=0), 1, count, seed)
        await nothing_held(engine)
        before, memory = await Holdings.now(), footprint_of_this()
        statuses = await _rounds(engine, load, rounds, count, seed)
        await nothing_held(engine)
        await nothing_left(before)
        grown = footprint_of_this() - memory
    await nothing_left(outside, sorts=OUTSIDE)
    return {
        "clients_that_left": rounds * count,
        "at_once": count,
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "neighbors_answered": load.answered,
        "neighbors_lost": dict(load.failed),
        "neighbors_that_differ": load.differing,
        "memory_grown_mib": round(grown / _MIB, 1),
        "left": "nothing",
        "passed": not load.failed and not load.differing,
    }


def footprint_of_this() -> int:
    """Resident memory of this program, which is server and clients in one."""
    return footprint(os.getpid()).resident_bytes


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        ("clients that left", f"{figures['clients_that_left']}, {figures['at_once']} at once"),
        ("statuses they were told", figures["statuses"]),
        ("neighbors answered", figures["neighbors_answered"]),
        ("neighbors lost", sum(figures["neighbors_lost"].values())),
        ("neighbors' answers that differ", figures["neighbors_that_differ"]),
        ("left of them", figures["left"]),
        ("memory grown, MiB", figures["memory_grown_mib"]),
    ]
    return markdown(("clients", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have crowds come and leave, print the table and save the record."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.clients", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        model = tiny_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(own_temporary_folder())
        figures = trio.run(clients, model, given.rounds, given.at_once, given.seed)
    print(table(figures))
    print(f"saved {save(RESULTS, 'clients', vars(given), figures)}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
