"""Pictures of an engine with several workers: each is shown, and the whole is their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio

from tests.engine.test_workers import STEP, Workers, answers_of, open_three, prompts
from tests.observability.test_live import row_of, seen
from trioserve import Engine
from trioserve.observability import live
from trioserve.observability.live.monitor import SnapshotSubscription
from trioserve.observability.live.schema import Pages, Snapshot
from trioserve.observability.live.workers import MAX_STEPS
from trioserve.testing.fake_engine import open_fake_engine


def watched(engine: Engine) -> Any:
    return live.monitor_of(engine).watched(requests=100, nodes=60)


def states_of(snapshot: Snapshot) -> list[tuple[int, str]]:
    return [(each.index, each.state) for each in snapshot.workers]


def has(state: str) -> Callable[[Snapshot], bool]:
    return lambda snapshot: state in dict(states_of(snapshot)).values()


def agreeing(snapshot: Snapshot) -> Snapshot:
    """``snapshot``, in which the workers add up to the whole."""
    workers = snapshot.workers
    assert sum(each.running for each in workers) == snapshot.counts.running
    assert sum(each.waiting for each in workers) == snapshot.counts.waiting
    assert sum(each.restarts for each in workers) == snapshot.worker.restarts
    for field in msgspec.structs.fields(Pages):
        total = sum(getattr(each.pages, field.name) for each in workers)
        assert total == getattr(snapshot.pages, field.name), field.name
    placed = Counter(row.worker for row in snapshot.requests if row.state in ("prefill", "decode"))
    assert placed == Counter({each.index: each.running for each in workers if each.running})
    assert {step.worker for step in snapshot.steps} <= {each.index for each in workers}
    assert len(snapshot.steps) <= MAX_STEPS
    return snapshot


async def test_one_worker_is_shown_as_one(autojump_clock: object) -> None:
    async with open_fake_engine() as engine:
        with watched(engine) as watcher:
            await engine.complete("abc", max_tokens=3, request_id="a")
            snapshot = agreeing(watcher.take())
    (worker,) = snapshot.workers
    assert (worker.index, worker.state, worker.device) == (0, "running", "fake")
    assert (worker.since, worker.pid) == (snapshot.worker.since, snapshot.worker.pid)
    assert (row_of(snapshot, "a").worker, row_of(snapshot, "a").moves) == (0, 0)


async def test_each_worker_has_its_figures(autojump_clock: object) -> None:
    def step_time(plan: Any) -> float:
        return STEP * float(1 + plan.number % 2)

    async with open_three(worker={"step_time": step_time}) as (engine, _):
        with watched(engine) as watcher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers_of, engine, prompts(9))
                await trio.sleep(1.0)
                watcher.take()
                await trio.sleep(1.0)
                snapshot = agreeing(watcher.take())
                nursery.cancel_scope.cancel()
    rates = [each.rates for each in snapshot.workers]
    assert min(each.generated_tokens_per_s for each in rates) > 0
    assert sum(each.steps_per_s for each in rates) == pytest.approx(snapshot.rates.steps_per_s)
    for worker in snapshot.workers:
        assert worker.rates.batch_rows == worker.running > 0
        assert worker.rates.generated_tokens_per_s == pytest.approx(
            worker.rates.steps_per_s * worker.running, rel=0.1
        )
        assert worker.decode_ms > 0
        numbers = [step.number for step in snapshot.steps if step.worker == worker.index]
        assert numbers == list(range(numbers[0], numbers[0] + MAX_STEPS // 3))
    assert [step.at for step in snapshot.steps] == sorted(step.at for step in snapshot.steps)
    assert {node.worker for node in snapshot.prefix.nodes} == {0, 1, 2}


async def test_a_lost_worker_is_shown_and_its_requests_have_moved(autojump_clock: object) -> None:
    async with open_three(load_time=10.0) as (engine, workers):
        with watched(engine) as watcher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers_of, engine, prompts(9))
                await trio.sleep(0.5)
                before = agreeing(watcher.take())
                workers.kills[1].set()
                await trio.sleep(0.1)
                lost = agreeing(watcher.take())
                await trio.sleep(11.0)
                after = agreeing(watcher.take())
                nursery.cancel_scope.cancel()
            await trio.sleep(1.0)
            over = watcher.take()
    assert (lost.health, lost.worker.state) == ("ok", "restarting")
    (sick,) = [each for each in lost.workers if each.state != "running"]
    was = before.workers[sick.index]
    assert (sick.state, was.state) == ("restarting", "running")
    assert (sick.last_loss, sick.running, sick.restarts) == ("the fake worker ended", 0, 1)
    assert 0 < lost.now - sick.since < 0.2
    for row in before.requests:
        now = row_of(lost, row.id)
        assert now.worker != sick.index
        assert now.moves == (row.worker == sick.index)
    assert sum(row.moves for row in lost.requests) == was.running > 0
    assert states_of(after) == [(0, "running"), (1, "running"), (2, "running")]
    assert after.workers[sick.index].restarts == 1
    ended = [row for row in over.requests if row.state == "finished"]
    assert len(ended) == 9
    assert sum(row.moves for row in ended) == was.running


async def test_workers_are_followed_as_they_come_and_go(autojump_clock: object) -> None:
    async with open_three(load_time=1.0) as (engine, _):
        with watched(engine) as watcher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers_of, engine, prompts(12))
                await trio.sleep(0.5)
                nursery.start_soon(engine.add_worker)
                await trio.sleep(0.5)
                loading = agreeing(watcher.take())
                await trio.sleep(1.0)
                nursery.start_soon(engine.complete, [7] * 9)
                assert states_of(agreeing(watcher.take()))[3] == (3, "running")
                await draining(engine, watcher)
                snapshot = await seen(watcher, lambda picture: len(picture.workers) == 3)
                agreeing(snapshot)
                await trio.sleep(0.2)
                assert {step.worker for step in agreeing(watcher.take()).steps} == {1, 2, 3}
                nursery.cancel_scope.cancel()
    assert states_of(loading)[3] == (3, "starting")
    assert (loading.workers[3].device, loading.workers[3].pages.total) == ("", 0)
    assert [each.index for each in snapshot.workers] == [1, 2, 3]
    assert sum(row.moves for row in snapshot.requests) > 0


async def draining(engine: Engine, watcher: SnapshotSubscription) -> None:
    """Remove worker 0, and have it seen meanwhile."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.remove_worker, 0)
        await seen(watcher, lambda picture: picture.workers[0].state == "draining")


async def test_a_worker_that_was_given_up_has_no_pages(autojump_clock: object) -> None:
    workers = Workers()
    async with open_fake_engine(
        open_worker=workers.open, data_parallel_size=3, max_worker_restarts=0
    ) as engine:
        with watched(engine) as watcher:
            workers.kills[0].set()
            snapshot = agreeing(await seen(watcher, has("ended")))
            assert snapshot.health == "ok"
            (ended,) = [each for each in snapshot.workers if each.state == "ended"]
            assert (ended.pages.total, ended.last_loss) == (0, "the fake worker ended")
            await engine.remove_worker(ended.index)
            left = agreeing(watcher.take()).workers
            assert [each.state for each in left] == ["running", "running"]
            assert engine.statistics().scheduler.pages_total == 512


async def test_a_worker_whose_step_hangs_is_named(autojump_clock: object) -> None:
    def step_time(plan: Any) -> float:
        return 1000.0 if plan.number > 40 and len(plan.row_slots) else STEP

    async with open_three(worker={"step_time": step_time}, watchdog_timeout=40, max_num_seqs=1) as (
        engine,
        _,
    ):
        with watched(engine) as watcher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers_of, engine, prompts(1))
                with trio.move_on_after(30):
                    snapshot = await seen(watcher, has("stalled"))
                assert [state for _, state in states_of(snapshot)].count("stalled") == 1
                assert snapshot.health == "stalled"
                nursery.cancel_scope.cancel()
