"""A worker that hangs: how long it may, what is excused, and that it is replaced."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import pytest
import trio
import trio.testing

from tests.scheduling import Bench, make_limits, worker
from trioserve import wire
from trioserve.engine import Engine
from trioserve.errors import WorkerLost
from trioserve.scheduler import SchedulerCore
from trioserve.scheduler.draft import InFlight
from trioserve.scheduler.watchdog import FIRST_SECONDS, MAX_FIRST_SECONDS, Watchdog
from trioserve.simulation import open_fake_engine
from trioserve.testing import FakeWorker

Clock = trio.testing.MockClock

FOR_EVER = 1e9
TIMEOUT = 10.0


def plan_of(num_tokens: int, size: float | None = None) -> InFlight:
    return InFlight(number=1, num_tokens=num_tokens, size=num_tokens if size is None else size)


# ---- the arithmetic


def test_only_what_has_come_back_is_held_to_the_timeout() -> None:
    watchdog = Watchdog(60.0)
    assert watchdog.deadline == math.inf
    first = plan_of(512)
    # A first chunk that takes a slow processor 40 s is far from its end.
    assert watchdog.allowance(first) > 60 + 50
    assert watchdog.allowance(plan_of(1 << 20)) == 60 + MAX_FIRST_SECONDS
    assert watchdog.allowance(plan_of(1)) == 60 + FIRST_SECONDS
    watchdog.follow(first, 100.0)
    watchdog.learn(140.0)
    assert watchdog.allowance(plan_of(1)) == watchdog.allowance(first) == 60 + 40
    assert watchdog.allowance(plan_of(2048)) == 60 + 4 * 40
    # What is quicker changes nothing, what is larger does.
    watchdog.follow(plan_of(2048), 140.0)
    watchdog.learn(142.0)
    assert watchdog.allowance(plan_of(4096)) == 60 + 2 * 40
    assert Watchdog(0).allowance(first) == math.inf


def test_a_long_context_is_given_more_time() -> None:
    core = SchedulerCore(make_limits(worker(num_pages=4096, max_model_len=16384, vocab_size=20000)))
    bench = Bench(worker(num_pages=4096, max_model_len=16384, vocab_size=20000), core)
    bench.submit([1] * 10240, max_tokens=1)
    sizes = []
    while bench.plan() is not None:
        sizes.append((core.in_flight[0].num_tokens, core.in_flight[0].size))
        bench.result()
    assert [tokens for tokens, _ in sizes] == [512] * 20 + [0]  # the last one closes the slot
    assert sizes[0][1] == 512
    assert sizes[-2][1] == 512 * (1 + 19 / 2)


def test_the_clock_runs_from_when_nothing_stands_before_the_plan() -> None:
    watchdog = Watchdog(60.0)
    one, two = plan_of(1), plan_of(1)
    watchdog.follow(one, 0.0)
    watchdog.learn(0.5)
    watchdog.follow(two, 0.5)
    watchdog.follow(two, 7.0)
    assert watchdog.deadline == 0.5 + 60.5
    assert not watchdog.is_late(0.5 + 30.25)
    assert watchdog.is_late(0.5 + 30.5)
    watchdog.hold()
    watchdog.hold()
    watchdog.release(20.0)
    assert watchdog.deadline == math.inf
    assert not watchdog.is_late(1000.0)
    watchdog.release(50.0)
    assert watchdog.deadline == 50 + 60.5
    watchdog.follow(None, 51.0)
    assert watchdog.deadline == math.inf
    assert not watchdog.is_late(1000.0)


# ---- the engine


def hangs_once(after: int, seconds: float = FOR_EVER) -> Callable[[], FakeWorker]:
    """Workers of which the first takes so many seconds for the step after ``after`` others."""
    workers: list[FakeWorker] = []

    def make() -> FakeWorker:
        def step_time(_: wire.Plan) -> float:
            is_it = len(workers) == 1 and workers[0].num_steps == after + 1
            return seconds if is_it else 0.01

        workers.append(FakeWorker(step_time=step_time, calls={"think": lambda _: None}))
        return workers[-1]

    return make


async def tokens_of(engine: Engine) -> tuple[int, ...]:
    completion = await engine.complete([1, 2, 3], max_tokens=20, seed=1)
    return completion.token_ids


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_worker_that_hangs_is_replaced(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    async with open_fake_engine() as engine:
        expected = await tokens_of(engine)
    options = {"watchdog_timeout": TIMEOUT, "max_plans_in_flight": depth}
    async with open_fake_engine(hangs_once(7), **options) as engine:
        began = trio.current_time()
        with caplog.at_level(logging.WARNING):
            assert await tokens_of(engine) == expected
        assert TIMEOUT < trio.current_time() - began < TIMEOUT + 5
        assert engine.statistics().worker_restarts == 1
        assert "no step within 10" in caplog.text
        assert "plan 8 of 1 rows and 1 tokens" in caplog.text
        engine.check_integrity()


async def test_it_shows_before_the_worker_is_given_up(autojump_clock: Clock) -> None:
    async with open_fake_engine(hangs_once(2), watchdog_timeout=TIMEOUT) as engine:
        scheduler = engine._scheduler
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine)
            await trio.sleep(4)
            assert not scheduler.stalled
            await trio.sleep(2)
            assert scheduler.stalled
            await trio.sleep(TIMEOUT)
            assert not scheduler.stalled
        assert engine.statistics().worker_restarts == 1


async def test_a_slow_step_and_a_worker_without_work_are_no_hang(autojump_clock: Clock) -> None:
    async with open_fake_engine(hangs_once(2, 9.5), watchdog_timeout=TIMEOUT) as engine:
        await tokens_of(engine)
        await trio.sleep(10 * TIMEOUT)
        await tokens_of(engine)
        assert engine.statistics().worker_restarts == 0


async def test_a_timeout_of_zero_waits_for_ever(autojump_clock: Clock) -> None:
    async with open_fake_engine(hangs_once(2, 1e6), watchdog_timeout=0) as engine:
        await tokens_of(engine)
        assert trio.current_time() > 1e6
        assert engine.statistics().worker_restarts == 0


async def test_a_call_that_takes_its_time_holds_the_watchdog(autojump_clock: Clock) -> None:
    """What the worker does in its turn keeps its plans waiting; that is no hang."""
    async with open_fake_engine(hangs_once(5, 30.0), watchdog_timeout=TIMEOUT) as engine:
        scheduler = engine._scheduler
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine)
            await trio.sleep(0.055)
            await scheduler.call("think")
        assert trio.current_time() > 30
        assert engine.statistics().worker_restarts == 0


async def test_a_call_that_is_given_up_holds_it_no_longer(autojump_clock: Clock) -> None:
    async with open_fake_engine(hangs_once(5), watchdog_timeout=TIMEOUT) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine)
            await trio.sleep(0.055)
            with trio.move_on_after(100):
                await engine.call_worker("think")
            assert engine.statistics().worker_restarts == 0
        assert 100 + TIMEOUT < trio.current_time() < 105 + TIMEOUT
        assert engine.statistics().worker_restarts == 1


async def test_asking_how_the_worker_is_does_not_hold_it(autojump_clock: Clock) -> None:
    async def ask(engine: Engine) -> None:
        with pytest.raises(WorkerLost):
            await engine.call_worker("statistics")

    async with open_fake_engine(hangs_once(5), watchdog_timeout=TIMEOUT) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine)
            await trio.sleep(0.055)
            nursery.start_soon(ask, engine)
        assert trio.current_time() < 2 * TIMEOUT


async def test_an_engine_that_was_stopped_itself_hears_the_worker_out(
    autojump_clock: Clock,
) -> None:
    """Its clock may have passed the deadline while the step was already there."""
    autojump_clock.autojump_threshold = math.inf
    step_time = 0.01
    async with open_fake_engine(
        lambda: FakeWorker(step_time=step_time), watchdog_timeout=TIMEOUT
    ) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.statistics().scheduler.plans_in_flight == 1
            autojump_clock.jump(10 * TIMEOUT)
            autojump_clock.autojump_threshold = 0
        assert engine.statistics().worker_restarts == 0


@pytest.mark.parametrize(("left", "num_replaced"), [(5.0, 0), (FOR_EVER, 1)])
async def test_a_worker_that_was_stopped_with_the_engine_has_its_time_again(
    autojump_clock: Clock, left: float, num_replaced: int
) -> None:
    """A paused container stops both in the middle of a step; once is enough for one that hangs."""
    stopped_for = 10 * TIMEOUT
    autojump_clock.autojump_threshold = math.inf
    workers = [FakeWorker(step_time=lambda _: stopped_for + left), FakeWorker(step_time=0.01)]
    async with open_fake_engine(lambda: workers.pop(0), watchdog_timeout=TIMEOUT) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(functools.partial(engine.complete, [1, 2, 3], max_tokens=1))
            await trio.testing.wait_all_tasks_blocked()
            assert engine.statistics().scheduler.plans_in_flight == 1
            autojump_clock.jump(stopped_for)
            autojump_clock.autojump_threshold = 0
        assert engine.statistics().worker_restarts == num_replaced
        assert trio.current_time() < stopped_for + 3 * TIMEOUT
