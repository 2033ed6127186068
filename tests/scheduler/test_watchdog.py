"""A worker that hangs: how long it may, what is excused, and that it is replaced."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import pytest
import trio
import trio.testing

from tests.support.scheduling import Bench, make_limits, worker
from trioserve.engine.engine import Engine
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest, WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.watchdog import FIRST_SECONDS, MAX_FIRST_SECONDS, Watchdog
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.text.worker_validation import MAX_CALL_SECONDS

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
    assert sizes[0][1] == 512 * (1 + 1 / 4)
    assert sizes[-2][1] == 512 * (1 + 19 / 2 + 1 / 4)


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
    # The caller knows how long that may take; the plan comes after it.
    calls = [watchdog.expect("think", 0, 1, 15.0) for _ in range(2)]
    watchdog.settle(calls[0], 20.0)
    assert watchdog.deadline == math.inf
    assert not watchdog.is_late(1000.0)
    watchdog.settle(calls[1], 50.0)
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
        scheduler = engine.schedulers[0]
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
    """Keep plans waiting during a call in the worker's turn; that is no hang."""
    worker = FakeWorker(
        step_time=0.01, calls={"think": lambda _: None}, call_time=30, calls_in_turn=True
    )
    async with open_fake_engine(lambda: worker, watchdog_timeout=TIMEOUT) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine)
            await trio.sleep(0.055)
            await engine.call_worker("think")
        assert trio.current_time() > 30
        assert engine.statistics().worker_restarts == 0


async def test_a_call_that_is_given_up_holds_it_no_longer(autojump_clock: Clock) -> None:
    async with open_fake_engine(
        hangs_in("think", in_turn=True), watchdog_timeout=TIMEOUT
    ) as engine:
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
    """Pass the deadline on the clock while the step's result was already there."""
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
    """Forgive a paused container, which stops both processes in the middle of a step, only once."""
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


# ---- calls


def test_a_call_has_time_by_its_size() -> None:
    watchdog = Watchdog(60.0)

    def allowed(name: str, num_bytes: int = 0) -> float:
        return watchdog.expect(name, num_bytes, 1, 0.0).allowed

    assert allowed("statistics") == allowed("swap_weights") == 60
    assert allowed("swap_weights", 10**9) == 60 + 10
    assert allowed("read_weights", 10**9) == 60 + 100
    assert allowed("load_adapter") == 60 + 120
    # Their callers keep the time.
    assert allowed("prepare") == allowed("encode") == math.inf
    assert Watchdog(0).expect("swap_weights", 0, 1, 0.0).allowed == math.inf


def test_what_stands_before_a_call_has_its_time_first() -> None:
    watchdog = Watchdog(60.0)
    one, two = InFlight(number=1, size=1), InFlight(number=2, size=1)
    watchdog.follow(one, 0.0)
    first = watchdog.expect("statistics", 0, 2, 1.0)
    second = watchdog.expect("ping", 0, 2, 2.0)
    assert watchdog.deadline == 60 + FIRST_SECONDS
    watchdog.learn(50.0)
    watchdog.follow(two, 50.0)
    assert watchdog.deadline == 50 + 60
    assert watchdog.reason() == "no answer to 'statistics' within 60 s (--watchdog-timeout)"
    assert not watchdog.is_late(80.0)
    assert watchdog.is_late(80.5)
    watchdog.settle(first, 90.0)
    assert watchdog.deadline == 90 + 60
    watchdog.settle(second, 100.0)
    assert watchdog.deadline == 100 + 60 + 50
    watchdog.settle_all(110.0)
    assert watchdog.deadline == math.inf


def test_what_threads_do_has_its_time_from_the_beginning() -> None:
    watchdog = Watchdog(60.0)
    watchdog.follow(plan_of(1), 0.0)
    reading = watchdog.expect("read_weights", 10**8, 2, 0.0)
    for _ in range(6):  # steps go on meanwhile
        watchdog.learn(10.0)
        watchdog.follow(plan_of(1), 10.0)
    assert watchdog.deadline == 60 + 10
    assert not watchdog.is_late(34.0)
    assert watchdog.is_late(36.0)
    assert "'read_weights' within 70 s" in watchdog.reason()
    # A paused container stops all processes: all work has its time again, for once.
    assert not watchdog.extend_deadlines(70.5)
    assert watchdog.extend_deadlines(1000.0)
    assert watchdog.deadline == 1000 + 70
    assert not watchdog.extend_deadlines(2000.0)
    watchdog.settle(reading, 2000.0)
    assert watchdog.deadline == 1000 + 60 + 10
    assert "no step" in watchdog.reason()


def hangs_in(name: str, *, in_turn: bool) -> Callable[[], FakeWorker]:
    """Workers of which the first never answers calls of that name."""
    workers: list[FakeWorker] = []

    def make() -> FakeWorker:
        is_first = not workers

        def call_time(call: wire.Call) -> float:
            return FOR_EVER if is_first and call.name == name else 0.0

        workers.append(FakeWorker(step_time=0.01, call_time=call_time, calls_in_turn=in_turn))
        return workers[-1]

    return make


@pytest.mark.parametrize("name", ["read_weights", "swap_weights"])
@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_worker_that_hangs_in_an_exchange_of_weights_is_replaced(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture, name: str, is_busy: bool
) -> None:
    """Serve on with the old weights, all requests included."""
    async with open_fake_engine() as engine:
        expected = await tokens_of(engine)
    make = hangs_in(name, in_turn=name == "swap_weights")
    async with open_fake_engine(make, watchdog_timeout=TIMEOUT) as engine:
        tokens: list[tuple[int, ...]] = []

        async def ask() -> None:
            tokens.append(await tokens_of(engine))

        async def ask_again() -> None:
            while True:
                await ask()

        async with trio.open_nursery() as nursery:
            if is_busy:
                nursery.start_soon(ask_again)
            else:
                await ask()
            began = trio.current_time()
            with caplog.at_level(logging.WARNING):
                with pytest.raises(WorkerLost, match=f"no answer to '{name}' within 10 s"):
                    await engine.control.swap_weights("/new", "retract")
            assert TIMEOUT < trio.current_time() - began < TIMEOUT + 5
            assert engine.weight_version == "default"
            assert not engine.paused
            await ask()
            nursery.cancel_scope.cancel()
        assert set(tokens) == {expected}
        assert engine.statistics().worker_restarts == 1
        assert f"no answer to '{name}'" in caplog.text
        # And with the next worker it can be done.
        await engine.control.swap_weights("/new", "retract", "new")
        assert engine.weight_version == "new"
        assert await tokens_of(engine) == expected
        engine.check_integrity()


async def test_an_adapter_that_is_never_loaded_is_an_error(autojump_clock: Clock) -> None:
    options = {"watchdog_timeout": TIMEOUT, "enable_lora": True}
    async with open_fake_engine(hangs_in("load_adapter", in_turn=False), **options) as engine:
        with pytest.raises(WorkerLost, match="the adapter: no answer to 'load_adapter' within"):
            await engine.load_adapter("a", "/a")
        assert TIMEOUT + 120 < trio.current_time() < TIMEOUT + 125
        await trio.sleep(1)
        assert engine.statistics().worker_restarts == 1
        await engine.load_adapter("a", "/a")
        assert (await engine.complete([1, 2], max_tokens=3, adapter="a")).finish_reason == "length"


async def test_an_idle_worker_that_never_answers_shows(autojump_clock: Clock) -> None:
    make = hangs_in("statistics", in_turn=True)
    async with open_fake_engine(make, watchdog_timeout=TIMEOUT) as engine:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(WorkerLost, match="'statistics' within 10 s"):
                    await engine.call_worker("statistics")

            nursery.start_soon(ask)
            await trio.sleep(TIMEOUT / 2 - 1)
            assert engine.healthy
            await trio.sleep(2)
            assert engine.stalled
        await trio.sleep(1)
        assert engine.statistics().worker_restarts == 1


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_worker_that_answers_nobody_is_found_by_a_grammar(
    autojump_clock: Clock, is_stopped: bool
) -> None:
    """Let a grammar take any time in a thread of its own; a stopped worker is lost."""
    make = hangs_in("prepare", in_turn=is_stopped)
    async with open_fake_engine(make, watchdog_timeout=TIMEOUT) as engine:
        with pytest.raises(InvalidRequest, match="--grammar-timeout"):
            await engine.complete([1], max_tokens=2, grammar=Grammar("regex", "a"))
        assert engine.statistics().worker_restarts == 0
        await trio.sleep(MAX_CALL_SECONDS + TIMEOUT + 2)
        assert engine.statistics().worker_restarts == is_stopped
