"""Workers that lend each other pages of their prefix caches."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.known_answers import (
    answer_to,
    faults_by_chance,
    keep_asking,
    next_token,
    prompt,
    step_time,
)
from trioserve import Engine
from trioserve.protocol import wire
from trioserve.scheduler import siblings
from trioserve.scheduler.fetched_pages import FetchPace
from trioserve.testing import FakeWorker, StepFails, WorkerDies
from trioserve.testing.fake_disk import FakeDisk
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_pages import FakePages

Clock = trio.testing.MockClock
PAGE = 4
SMALL: dict[str, Any] = {"num_pages": 16, "num_host_pages": 16, "page_size": PAGE}
OPTIONS: dict[str, Any] = {
    "data_parallel_size": 2,
    "routing_policy": "round_robin",
    "kv_offloading_bytes": 1,
}


async def ask(engine: Engine, number: int, count: int = 3, **options: Any) -> int:
    """Ask for an answer, check it, and return the number of cached tokens."""
    completion = await engine.complete(prompt(number), max_tokens=count, **options)
    assert list(completion.token_ids) == answer_to(prompt(number), count)
    return completion.usage.cached_tokens


def workers(**options: Any) -> Callable[[], FakeWorker]:
    disk = FakeDisk()
    defaults = {**SMALL, "step_time": step_time, "token": next_token}
    return lambda: FakeWorker(disk=disk, **{**defaults, **options})


async def test_a_prefix_comes_from_a_sibling(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **OPTIONS) as engine:
        assert await ask(engine, 0) == 0
        assert await ask(engine, 0) == 20  # five pages of four tokens
        assert engine.statistics().scheduler.pages_imported == 5
        assert await ask(engine, 0) == 20
        assert await ask(engine, 0) == 20
        assert engine.statistics().scheduler.pages_imported == 5, "both have it now"
        engine.check_integrity()


@pytest.mark.parametrize(
    ("at", "parts"),
    [(["", ""], [16, 6]), (["", "far"], [8, 8, 6]), (["far", "farther"], [8, 8, 6])],
    ids=["one-host", "two-hosts", "three-hosts"],
)
async def test_pages_come_in_parts(
    autojump_clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    at: list[str],
    parts: list[int],
) -> None:
    """Pages of other hosts come over the links."""
    monkeypatch.setattr(siblings, "_IN_MEMORY", 16)
    hosts = itertools.cycle(at)
    ready = FakeWorker.ready
    monkeypatch.setattr(FakeWorker, "ready", lambda self: ready(self, host=next(hosts)))
    calls: list[int] = []
    disk_export = FakeDisk.export_pages

    def count(self: FakeDisk, weights: str, pages: FakePages, arguments: Any) -> bytes:
        assert ("memory" in arguments) == (not any(at))
        calls.append(len(arguments["keys"]))
        return disk_export(self, weights, pages, arguments)

    monkeypatch.setattr(FakeDisk, "export_pages", count)
    make = workers(num_pages=120, num_host_pages=120)
    async with open_fake_engine(make, **OPTIONS) as engine:
        tokens = prompt(0, 90)
        for _ in range(2):
            completion = await engine.complete(tokens, max_tokens=3)
            assert list(completion.token_ids) == answer_to(tokens, 3)
        assert completion.usage.cached_tokens == 4 * sum(parts)
        assert calls == parts
        assert engine.statistics().scheduler.pages_imported == sum(parts)
        engine.check_integrity()


async def test_salts_are_kept_apart(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **OPTIONS) as engine:
        assert await ask(engine, 0, cache_salt="one") == 0
        assert await ask(engine, 0, cache_salt="other") == 0
        assert await ask(engine, 0, cache_salt="other") == 20
        assert await ask(engine, 0, cache_salt="one") == 20


async def test_a_flushed_prefix_is_computed(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **OPTIONS) as engine:
        await ask(engine, 0)
        engine.flush_cache()
        assert await ask(engine, 0) == 0


async def test_pages_of_other_weights_are_not_used(autojump_clock: Clock) -> None:
    """The memory says which weights its pages were computed with."""
    made: list[FakeWorker] = []
    make = workers()

    def note() -> FakeWorker:
        made.append(make())
        return made[-1]

    async with open_fake_engine(note, **OPTIONS) as engine:
        await ask(engine, 0)
        made[1].weights = "others"
        assert await ask(engine, 0) == 0
        assert engine.statistics().scheduler.pages_imported == 0


class Keeping(FakeWorker):
    """A worker whose pages don't leave it."""

    def ready(self, **changes: Any) -> wire.Ready:
        return super().ready(lends_pages=False, **changes)


async def test_workers_that_keep_their_pages_are_not_asked(autojump_clock: Clock) -> None:
    calls: list[str] = []
    exported = {"export_pages": lambda _: calls.append("export_pages")}

    def make() -> FakeWorker:
        return Keeping(**SMALL, step_time=step_time, token=next_token, calls=exported)

    async with open_fake_engine(make, **OPTIONS) as engine:
        for _ in range(2):
            assert await ask(engine, 0) == 0
        assert await ask(engine, 0) == 20
        assert calls == []
        engine.check_integrity()


async def test_a_sibling_that_is_too_slow_is_not_asked(autojump_clock: Clock) -> None:
    slow = {"export_pages": 50.0}
    make = workers(call_time=lambda call: slow.get(call.name, 0.0))
    async with open_fake_engine(make, **OPTIONS) as engine:
        for number in range(6):
            await ask(engine, number)
        assert await ask(engine, 6) == 0
        assert await ask(engine, 6) == 20, "no transfer was measured yet"
        await ask(engine, 7)
        began = trio.current_time()
        assert await ask(engine, 7) == 0
        assert trio.current_time() - began < 5


def test_a_transfer_has_a_time_of_its_own_and_one_for_each_page() -> None:
    pace = FetchPace()
    assert pace.seconds_of(100) == 0
    for _ in range(5):
        pace.learn(12, 0.02)
    assert pace.seconds_of(120) == pytest.approx(0.02), "larger ones are tried"
    for _ in range(5):
        pace.learn(120, 0.02 + 108 * 1e-4)
        pace.learn(12, 0.02)
    assert pace.line() == pytest.approx((0.02 - 12e-4, 1e-4), rel=1e-6)
    for _ in range(100):
        pace.forget()
    assert pace.seconds_of(120) < 0.01


async def test_pages_are_held_while_they_are_lent(autojump_clock: Clock) -> None:
    """The lender computes others meanwhile, which need more pages than are left."""
    make = workers(num_pages=12, call_time=lambda call: 5.0 if call.name == "export_pages" else 0.0)
    async with open_fake_engine(make, **OPTIONS) as engine:
        await ask(engine, 0)
        async with trio.open_nursery() as nursery:
            cached: list[int] = []

            async def borrow() -> None:
                cached.append(await ask(engine, 0))

            nursery.start_soon(borrow)
            await trio.sleep(1)
            cores = [each.core for each in engine.schedulers if each.core is not None]
            assert [sum(core.memory.lending.held.values()) for core in cores] == [5, 0]
            engine.check_integrity()
            for number in range(1, 5):
                nursery.start_soon(ask, engine, number)
        assert cached == [20]
        engine.check_integrity()


@pytest.mark.parametrize("loses", ["lender", "borrower"])
async def test_a_loss_during_a_transfer_costs_no_request(autojump_clock: Clock, loses: str) -> None:
    name = "export_pages" if loses == "lender" else "import_pages"
    num_calls = 0

    def die(_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise WorkerDies

    calls = {name: die}
    make = workers(calls=calls, calls_in_turn=True)
    async with open_fake_engine(make, **OPTIONS) as engine:
        await ask(engine, 0)
        # A request of a lost borrower moves to the lender.
        assert await ask(engine, 0) == (0 if loses == "lender" else 20)
        assert num_calls == 1
        calls.clear()
        await ask(engine, 1)
        assert await ask(engine, 1) in (0, 20)
        engine.check_integrity()


async def test_pages_are_held_until_they_are_written_even_for_a_lost_worker(
    autojump_clock: Clock,
) -> None:
    """Else the lender would write other pages under their keys, perhaps for the next transfer."""
    slow = {"export_pages": 5.0}
    make = workers(call_time=lambda call: slow.get(call.name, 0.0))
    async with open_fake_engine(make, **OPTIONS) as engine:
        await ask(engine, 0)
        lender, borrower = engine.schedulers
        assert lender.core is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 0)
            await trio.sleep(1)
            assert lender.core.memory.lending.held
            borrower.report_fault("it hangs")
            await trio.sleep(1)
            assert not borrower.attached or borrower.num_attached == 2
            assert lender.core.memory.lending.held
        await trio.sleep(5)
        assert not lender.core.memory.lending.held
        engine.check_integrity()


async def test_nothing_is_fetched_to_places_from_before_a_reset(autojump_clock: Clock) -> None:
    """A step of the borrower fails while the lender writes: its places are others' then."""
    failing: list[int] = []
    called: set[tuple[str, int]] = set()

    def script(_: int, plan: wire.Plan) -> None:
        if failing and plan.row_slots:
            failing.pop()
            raise StepFails("a step fails")

    def call_time(call: wire.Call) -> float:
        called.add((call.name, call.number))
        return 5.0 if call.name == "export_pages" else 0.1

    make = workers(script=script, call_time=call_time)
    async with open_fake_engine(make, **OPTIONS) as engine:
        await ask(engine, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 0)
            await trio.sleep(1)
            await ask(engine, 1)  # on the lender
            failing.append(1)
            await ask(engine, 2)
        assert not failing
        # The request asks again after the reset.
        names = [name for name, _ in called]
        assert (names.count("export_pages"), names.count("import_pages")) == (2, 1)
        engine.check_integrity()


async def test_pages_of_a_failed_plan_are_not_taken(autojump_clock: Clock) -> None:
    """The lender's plan that computes them fails before they are written."""
    num_steps = 0

    def script(_: int, plan: wire.Plan) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 1:
            raise StepFails("a step fails")

    make = workers(script=script, step_time=1.0, max_num_batched_tokens=8)
    async with open_fake_engine(make, **OPTIONS) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 0)
            await trio.sleep(0.5)
            nursery.start_soon(ask, engine, 0)
        engine.check_integrity()


async def test_a_client_that_leaves_frees_both_sides(autojump_clock: Clock) -> None:
    make = workers(call_time=lambda call: 5.0 if call.name.endswith("port_pages") else 0.0)
    async with open_fake_engine(make, **OPTIONS) as engine:
        for wait in (1, 6):
            await ask(engine, wait)
            with trio.move_on_after(wait):
                await ask(engine, wait)
                raise AssertionError("it had to wait")
            engine.check_integrity()
            await trio.sleep(20)
            engine.check_integrity()
        assert engine.statistics().scheduler.pages_held == 0


async def run_history(seed: int) -> None:
    numbers = random.Random(seed)

    make = workers(
        num_pages=numbers.choice((9, 12, 20)),
        num_host_pages=numbers.choice((2, 6, 20)),
        script=faults_by_chance(numbers),
        step_time=numbers.choice((0.0, 0.1)),
        call_time=lambda _: numbers.choice((0.0, 0.0, 0.05, 0.7)),
    )

    ask_by_chance = functools.partial(keep_asking, numbers=numbers, num_prompts=6, most_tokens=6)
    options = {
        **OPTIONS,
        "data_parallel_size": numbers.choice((2, 3)),
        "routing_policy": "predicted",
    }
    async with open_fake_engine(make, max_worker_restarts=1000, **options) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask_by_chance, engine)
        await trio.sleep(10)
        engine.check_integrity()


@pytest.mark.parametrize("seed", range(40))
async def test_random_histories(autojump_clock: Clock, seed: int) -> None:
    await run_history(seed)
