"""Short versions of the fault tests in ``tests/faults/``: real processes, real sockets.

Each does its worst to a small engine under load, whose answers are known beforehand, and then looks
for anything that is left.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from tests.faults.clients import crowd
from tests.faults.full_disk import full_disk, small_disk
from tests.faults.hangs import disturb_workers
from tests.faults.leftovers import (
    OUTSIDE,
    Holdings,
    nothing_held,
    nothing_left,
    own_temporary_folder,
)
from tests.faults.load import Steady
from tests.faults.messages import Harm, harm_workers
from tests.faults.rank_faults import FAULTS, RankScenario, lose_ranks
from tests.faults.rank_faults import figures as rank_figures
from tests.faults.stage import engine_over, serve_here, sole_worker, tiny_model
from tests.faults.worker_kills import Scenario, figures, lose_workers
from tests.support.kernels import isas
from tests.support.tiny_models import make_tiny
from trioserve import Engine
from trioserve.protocol.errors import NoRoomForWorker, WorkerLost
from trioserve.workers.supervisor import Supervisor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(autouse=True)
def temporary_folder() -> Iterator[Path]:
    with own_temporary_folder() as folder:
        yield folder


@asynccontextmanager
async def under_load(model: str, **options: Any) -> AsyncIterator[tuple[Engine, Steady]]:
    """Open an engine and clients that repeat the same requests until the block is left.

    Then every answer has to be the undisturbed one, and nothing may be left.
    """
    outside = await Holdings.now()
    async with engine_over(model, dtype="auto", **options) as engine:
        load = Steady(engine=engine, clients=4, requests=8)
        await load.learn()
        await nothing_held(engine)
        before = await Holdings.now()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            with trio.fail_after(170):
                await load.wait_token()
                yield engine, load
                await load.wait_token()
                load.end()
        await nothing_held(engine)
        await nothing_left(before)
    await nothing_left(outside, sorts=OUTSIDE)
    assert load.failed == {}
    assert load.differing == 0
    assert load.answered > 0


async def test_a_worker_that_is_killed_every_second(model: str) -> None:
    numbers = random.Random(0)
    async with under_load(model) as (engine, load):
        for kills in range(1, 4):
            await trio.sleep(numbers.uniform(0.2, 0.8))
            await kill_worker(engine)
            await load.wait_token()
            assert engine.statistics().worker_restarts == kills


async def test_a_worker_that_is_stopped_and_one_that_hangs(model: str) -> None:
    async with under_load(model, watchdog_timeout=3.0) as (engine, load):
        ((noticed, _),) = await disturb_workers(engine, load, "stopped", 1, seed=0)
        assert noticed < 1.0
        ((noticed, _),) = await disturb_workers(engine, load, "hung", 1, seed=0)
        assert noticed > 3.0


async def test_messages_that_are_cut_short_and_garbled(model: str) -> None:
    harms = [Harm("truncated", "to engine", 20, 1), Harm("wrong beginning", "to worker", 20, 2)]
    async with under_load(model, watchdog_timeout=5.0) as (engine, load):
        for harmed in await harm_workers(engine, load, harms):
            assert harmed.replaced


async def test_a_folder_for_sockets_that_is_gone_for_a_while(
    model: str, temporary_folder: Path, tmp_path: Path
) -> None:
    async with under_load(model) as (engine, load):
        temporary_folder.rename(tmp_path / "elsewhere")
        await kill_worker(engine)
        await trio.sleep(1)  # so many attempts as would have ended the engine, were they deaths
        assert sole_worker() is None
        (tmp_path / "elsewhere").rename(temporary_folder)
        await load.wait_token()
        assert engine.statistics().worker_restarts == 1


async def test_a_full_disk(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if small_disk(Path(folder)) is None:
            pytest.skip("this user may not mount anything, not even in a namespace")
    figures, passed = await full_disk(model, 1, 1.0, 2)
    assert figures["kills with a full disk"] == 1
    assert figures["requests answered"] > 0
    assert passed, figures


async def test_no_room_for_a_worker_is_a_pause_however_long(autojump_clock: object) -> None:
    starts = 0

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[Any]:
        nonlocal starts
        starts += 1
        if 2 <= starts < 52:
            raise NoRoomForWorker("No space left on device")
        yield None, SimpleNamespace(pid=1, rank_pids=[])

    async def attach(*_: object) -> None:
        if starts == 1:
            raise WorkerLost("killed", from_outside=True)
        await trio.sleep_forever()

    supervisor = Supervisor(open_worker=open_worker, max_restarts=3, judge=lambda _: 1)
    with trio.move_on_after(3600) as scope:
        await supervisor.run(attach)
    assert scope.cancelled_caught
    assert (starts, supervisor.restarts) == (52, 1)


@pytest.mark.skipif(not isas(), reason="no compiled kernels")
async def test_workers_that_are_lost_in_every_way(qwen3: str) -> None:
    ways = ("killed", "closed", "silent", "removed")
    scenario = Scenario(
        losses=len(ways),
        ways=ways,
        requests=8,
        words=30,
        tokens=60,
        mean_interval=0.1,
        link_timeout=1.0,
    )
    run = await lose_workers(scenario, qwen3)
    assert run.lost == dict.fromkeys(ways, 1)
    assert {each.way for each in run.moves} == set(ways)
    made = figures(run)
    assert made.facts["passed"], made.table


@pytest.mark.skipif(not isas(), reason="no compiled kernels")
async def test_ranks_that_are_lost_in_every_way(tmp_path: Path) -> None:
    run = await lose_ranks(RankScenario(layout="2 ranks", faults=6, mean_interval=0.1), tmp_path)
    assert {way: len(seconds) for way, seconds in run.noticed.items()} == dict.fromkeys(FAULTS, 2)
    assert max(max(seconds) for seconds in run.noticed.values()) < 2.0  # 1 s on a quiet machine
    made = rank_figures({"2 ranks": run})
    assert made.facts["passed"], made.table


async def test_three_hundred_clients_that_leave_at_random_moments(model: str) -> None:
    async with under_load(model) as (engine, _), serve_here(engine) as port:
        statuses = await crowd(port, 300, seed=1, spread=0.5)
        # Some had been answered by then, and none with an error of the server's.
        assert statuses[200] > 0
        assert set(statuses) <= {0, 200}


async def kill_worker(engine: Engine) -> None:
    """Kill the worker, and wait until the engine has noticed."""
    while (worker := sole_worker()) is None:
        await trio.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    while engine.healthy:
        await trio.sleep(0.01)
