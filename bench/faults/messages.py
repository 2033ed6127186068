"""Messages between engine and worker that are cut short, garbled, lost or doubled.

``python -m bench.faults.messages``. Each worker sits behind :mod:`bench.faults.damage`, which harms
one message of its life: every kind of damage in both directions, under load. What is no message, or
comes out of turn, costs a worker, which is replaced. Bits that are flipped where any value is
possible (a token's id) can't be noticed; those answers may differ, and are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import trio

from bench.faults.damage import DIRECTIONS, KINDS, command
from bench.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_held,
    nothing_left,
    own_temporary_folder,
)
from bench.faults.results import RESULTS, markdown, save
from bench.faults.stage import engine_over, sole_worker, tiny_model
from bench.faults.steady import Steady
from trioserve import Engine
from trioserve.workers import supervisor

_STEPS_AFTER = 40
"""A worker that goes on for so many steps after the damage hasn't minded it."""


@attrs.frozen
class Harm:
    """What is done to which message of a worker's life."""

    kind: str
    direction: str
    after: int
    seed: int


@attrs.frozen(kw_only=True)
class Harmed:
    """What came of it. ``replaced`` says whether the worker was."""

    harm: Harm
    answered: int
    lost: dict[str, int]
    differing: int
    replaced: bool


@contextlib.contextmanager
def damaged_workers(harms: list[Harm]) -> Iterator[None]:
    """The next workers sit behind ``harms``, each of which is taken out; then they are as ever."""
    real = supervisor.worker_command

    def worker_command(url: str) -> tuple[list[str], dict[str, str]]:
        if not harms:
            return real(url)
        harm = harms.pop(0)
        return command(url, harm.kind, harm.direction, harm.after, harm.seed)

    with mock.patch.object(supervisor, "worker_command", worker_command):
        yield


async def harm_workers(engine: Engine, load: Steady, harms: Sequence[Harm]) -> list[Harmed]:
    """For each of ``harms`` a worker that comes to it, under a load that is running."""
    harmed = []
    for harm in harms:
        answered, differing, lost = load.answered, load.differing, Counter(load.failed)
        with damaged_workers([harm]):
            replaced = await _harm_one(engine, load, harm)
        harmed.append(
            Harmed(
                harm=harm,
                answered=load.answered - answered,
                lost=dict(load.failed - lost),
                differing=load.differing - differing,
                replaced=replaced,
            )
        )
    return harmed


async def _harm_one(engine: Engine, load: Steady, harm: Harm) -> bool:
    """Have the worker replaced by one whose link does ``harm``, and wait until that has shown; says
    whether it was replaced in turn."""
    restarts = engine.statistics().worker_restarts
    while (worker := sole_worker()) is None:
        await trio.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    while engine.statistics().worker_restarts == restarts or not engine.healthy:
        await trio.sleep(0.01)
    steps = engine.statistics().scheduler.num_steps
    while True:
        statistics = engine.statistics()
        if statistics.worker_restarts > restarts + 1:
            while not engine.healthy:
                await trio.sleep(0.01)
            await load.wait_token()
            return True
        if statistics.scheduler.num_steps >= steps + harm.after + _STEPS_AFTER:
            return False
        await trio.sleep(0.01)


async def messages(model: str, harms: Sequence[Harm]) -> dict[str, Any]:
    """An engine over ``model`` whose workers' links do ``harms``; the figures."""
    outside = await Holdings.now()
    async with engine_over(model, watchdog_timeout=1.0) as engine:
        load = Steady(engine=engine, clients=4, requests=8)
        await load.learn()
        await nothing_held(engine)
        before = await Holdings.now()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.wait_token()
            harmed = await harm_workers(engine, load, harms)
            load.end()
        await nothing_held(engine)
        await nothing_left(before)
    await nothing_left(outside, sorts=OUTSIDE)
    blind = [one for one in harmed if one.harm.kind == "flipped bits"]
    seen = [one for one in harmed if one.harm.kind != "flipped bits"]
    return {
        "harms": [attrs.asdict(one) for one in harmed],
        "workers_replaced": sum(one.replaced for one in harmed),
        "requests_answered": load.answered,
        "requests_lost": sum(load.failed.values()),
        "lost": dict(load.failed),
        "answers_that_differ": sum(one.differing for one in seen),
        "answers_that_differ_by_flipped_bits": sum(one.differing for one in blind),
        "passed": not any(one.lost or one.differing for one in seen),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        (
            one["harm"]["kind"],
            one["harm"]["direction"],
            "yes" if one["replaced"] else "no",
            one["answered"],
            sum(one["lost"].values()),
            one["differing"],
        )
        for one in figures["harms"]
    ]
    head = ("message", "on its way", "worker replaced", "answered", "lost", "differ")
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do every harm, print the table and save the record. 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.messages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of each damage in each direction")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    numbers = random.Random(given.seed)
    harms = [
        Harm(kind, direction, numbers.randint(20, 80), numbers.getrandbits(32))
        for _ in range(given.rounds)
        for kind in KINDS
        for direction in DIRECTIONS
    ]
    with tempfile.TemporaryDirectory() as folder, own_temporary_folder():
        figures = trio.run(messages, tiny_model(Path(folder)), harms)
    print(table(figures))
    for error, count in figures["lost"].items():
        print(f"lost {count}: {error}")
    print(f"saved {save(RESULTS, 'messages', vars(given), figures)}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
