"""Messages between engine and worker that are cut short, garbled, lost or doubled.

``python -m tests.faults.messages``. Each worker sits behind :mod:`tests.faults.damage`, which harms
one message of its life: every kind of damage in both directions, under load. What is no message, or
comes out of turn, costs a worker, which is replaced. Bits that are flipped where any value is
possible (a token's id) can't be noticed; those answers may differ, and are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from unittest import mock

import attrs
import trio

from bench.report import Made, markdown, run_script
from tests.faults.damage import DIRECTIONS, KINDS, command
from tests.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_left,
    nothing_of_it,
    own_temporary_folder,
)
from tests.faults.load import Steady
from tests.faults.stage import engine_over, model_named, sole_worker
from trioserve import Engine
from trioserve.workers import process as worker_process
from trioserve.workers.command import worker_command

_STEPS_AFTER = 40
"""A worker that goes on for so many steps after the damage hasn't minded it."""


@attrs.frozen
class Harm:
    """The damage to one message of a worker's life."""

    kind: str
    direction: str
    after: int
    seed: int


@attrs.frozen(kw_only=True)
class Harmed:
    """The consequences of a harm, and whether the worker was ``replaced``."""

    harm: Harm
    answered: int
    lost: int
    differing: int
    replaced: bool


@contextlib.contextmanager
def damaged_worker(harm: Harm) -> Iterator[None]:
    """Put the next worker, and no other, behind ``harm``."""
    harms = [harm]

    def damaged_command(url: str) -> tuple[list[str], dict[str, str]]:
        return command(url, **attrs.asdict(harms.pop())) if harms else worker_command(url)

    with mock.patch.object(worker_process, "worker_command", damaged_command):
        yield


async def harm_workers(engine: Engine, load: Steady, harms: Sequence[Harm]) -> list[Harmed]:
    """Do each of ``harms`` to a worker of its own, under a load that is running."""
    harmed = []
    for harm in harms:
        answered, differing, lost = load.answered, load.differing, Counter(load.failed)
        with damaged_worker(harm):
            replaced = await _harm_one(engine, load, harm)
        counts = {"answered": load.answered - answered, "differing": load.differing - differing}
        counts["lost"] = (load.failed - lost).total()
        harmed.append(Harmed(harm=harm, replaced=replaced, **counts))
    return harmed


async def _harm_one(engine: Engine, load: Steady, harm: Harm) -> bool:
    """Have the worker replaced by one whose link does ``harm``; return whether that one is, too."""
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


async def messages(model: str, harms: Sequence[Harm]) -> tuple[list[Harmed], Counter[str]]:
    """Do ``harms`` to the workers of an engine over ``model``; return what came of them."""
    outside = await Holdings.now()
    async with engine_over(model, watchdog_timeout=1.0) as engine:
        load = Steady(engine=engine, clients=4, requests=8)
        async with nothing_of_it(engine, load):
            await load.wait_token()
            harmed = await harm_workers(engine, load, harms)
    await nothing_left(outside, sorts=OUTSIDE)
    return harmed, load.failed


def measure(options: argparse.Namespace) -> Made:
    """Return a table with a line for each harm."""
    numbers = random.Random(options.seed)
    harms = [
        Harm(kind, direction, numbers.randint(20, 80), numbers.getrandbits(32))
        for _, kind, direction in itertools.product(range(options.rounds), KINDS, DIRECTIONS)
    ]
    with model_named("tiny") as model, own_temporary_folder():
        harmed, lost = trio.run(messages, model, harms)
    lines = [
        [one.harm.kind, one.harm.direction, "yes" if one.replaced else "no"]
        + [str(count) for count in (one.answered, one.lost, one.differing)]
        for one in harmed
    ]
    heads = ("message", "on its way", "worker replaced", "answered", "lost", "differ")
    seen = [one for one in harmed if one.harm.kind != "flipped bits"]
    passed = not any(one.lost or one.differing for one in seen)
    return Made(markdown(heads, lines), {"lost": dict(lost), "passed": passed}, int(not passed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do every harm; return 1 if anything was lost that needn't be."""
    return run_script("faults_messages", measure, arguments, rounds=1, seed=0)


if __name__ == "__main__":
    raise SystemExit(main())
