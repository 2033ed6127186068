"""Pages on disk: written from the host, found after a restart, and never waited for long."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.known_answers import answer_to, keep_asking, next_token, prompt
from trioserve import Engine
from trioserve.protocol import wire
from trioserve.scheduler.disk_pages import DiskIndex, DiskPages
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.testing import FakeWorker, StepFails, WorkerDies
from trioserve.testing.fake_disk import FakeDisk
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock
OPTIONS: dict[str, Any] = {"kv_offloading_bytes": 1, "kv_offloading_dir": "/nowhere"}
PAGE = 4
SMALL: dict[str, Any] = {"num_pages": 12, "num_host_pages": 8, "page_size": PAGE}


async def ask(engine: Engine, number: int, **options: Any) -> int:
    """Ask for an answer, check it, and return the number of cached tokens."""
    completion = await engine.complete(prompt(number), max_tokens=3, **options)
    assert list(completion.token_ids) == answer_to(prompt(number), 3)
    return completion.usage.cached_tokens


def workers(disk: FakeDisk, **options: Any) -> Callable[[], FakeWorker]:
    return lambda: FakeWorker(disk=disk, token=next_token, step_time=0.1, **{**SMALL, **options})


async def fill(disk: FakeDisk) -> None:
    """Have an engine write pages of the first prompts."""
    async with open_fake_engine(workers(disk), **OPTIONS) as engine:
        for number in range(6):
            await ask(engine, number)
        await trio.sleep(1)


async def test_pages_survive_a_restart(autojump_clock: Clock) -> None:
    disk = FakeDisk()
    async with open_fake_engine(workers(disk), **OPTIONS) as engine:
        for number in range(6):
            assert await ask(engine, number) == 0
        await trio.sleep(1)
        statistics = engine.statistics().scheduler
        assert statistics.pages_written == len(disk.of("")) > 0
        engine.check_integrity()
    async with open_fake_engine(workers(disk), **OPTIONS) as engine:
        await trio.sleep(0.1)  # until it knows what is on disk
        assert await ask(engine, 0) == 20  # five pages of four tokens
        statistics = engine.statistics().scheduler
        assert statistics.pages_read == 5
        assert statistics.pages_onloaded == 5
        assert await ask(engine, 0, cache_salt="other") == 0
        engine.check_integrity()


async def test_pages_that_fell_out_of_the_host_come_back_from_the_disk(
    autojump_clock: Clock,
) -> None:
    disk = FakeDisk()
    async with open_fake_engine(workers(disk), **OPTIONS) as engine:
        for number in range(12):
            await ask(engine, number)
        assert engine.statistics().scheduler.host_pages_cached <= SMALL["num_host_pages"]
        assert await ask(engine, 0) == 20
        engine.check_integrity()


async def test_no_page_of_the_old_weights_goes_to_files_of_the_new(autojump_clock: Clock) -> None:
    """Pages that wait to be written when the weights are exchanged are written nowhere."""
    disk = FakeDisk()
    slow = {"write_pages": 0.5, "swap_weights": 2.0}
    make = workers(disk, call_time=lambda call: slow.get(call.name, 0.0))
    async with open_fake_engine(make, **OPTIONS) as engine:
        for number in range(6):
            await ask(engine, number)
        written = engine.statistics().scheduler.pages_written
        assert written < engine.statistics().scheduler.pages_offloaded
        await engine.control.swap_weights("/new", "wait")
        await trio.sleep(10)
        assert disk.of("/new") == {}
        assert written <= len(disk.of("")) <= written + 2
        engine.check_integrity()


async def test_a_request_waits_only_if_reading_is_quicker(autojump_clock: Clock) -> None:
    disk = FakeDisk()
    slow = {"read_pages": 50.0}

    def make() -> FakeWorker:
        return FakeWorker(
            disk=disk,
            token=next_token,
            step_time=lambda plan: 0.1 + 0.01 * int(wire.ints(plan.row_counts).sum()),
            call_time=lambda call: slow.get(call.name, 0.0),
            **SMALL,
        )

    async with open_fake_engine(make, **OPTIONS) as engine:
        for number in range(12):
            await ask(engine, number)
        assert await ask(engine, 0) == 20, "no transfer was measured yet"
        began = trio.current_time()
        assert await ask(engine, 1) == 0
        assert trio.current_time() - began < 2.0
        engine.check_integrity()


async def test_others_overtake_a_request_that_waits(autojump_clock: Clock) -> None:
    disk = FakeDisk()
    ends: dict[str, float] = {}
    await fill(disk)

    async def timed(engine: Engine, name: str, number: int, cached: int) -> None:
        assert await ask(engine, number) == cached
        ends[name] = trio.current_time() - began

    make = workers(disk, call_time=lambda call: 5.0 if call.name == "read_pages" else 0.0)
    async with open_fake_engine(make, **OPTIONS) as engine:
        await trio.sleep(0.1)  # until it knows what is on disk
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timed, engine, "cached", 0, 20)
            nursery.start_soon(timed, engine, "the same", 0, 20)
            nursery.start_soon(timed, engine, "new", 50, 0)
        assert ends["new"] < 2 < 5 < ends["cached"]
        assert engine.statistics().scheduler.pages_read == 5
        engine.check_integrity()


async def test_pages_that_are_gone_are_computed(autojump_clock: Clock) -> None:
    disk = FakeDisk()
    async with open_fake_engine(workers(disk), **OPTIONS) as engine:
        for number in range(12):
            await ask(engine, number)
        kept = dict(list(disk.of("").items())[:2])
        disk.of("").clear()
        assert await ask(engine, 0) == 0
        disk.of("").update(kept)
        engine.check_integrity()


async def test_a_worker_that_can_keep_no_pages_costs_no_request_anything(
    autojump_clock: Clock,
) -> None:
    def refuse(_: Any) -> None:
        raise OSError("the disk is full")

    calls = dict.fromkeys(("write_pages", "read_pages", "list_pages"), refuse)
    async with open_fake_engine(workers(FakeDisk(), calls=calls), **OPTIONS) as engine:
        for number in range(8):
            assert await ask(engine, number) == 0
        engine.check_integrity()


async def test_an_emptied_cache_is_emptied_on_disk(autojump_clock: Clock) -> None:
    disk = FakeDisk()
    async with open_fake_engine(workers(disk), **OPTIONS) as engine:
        for number in range(6):
            await ask(engine, number)
        await trio.sleep(1)
        assert disk.of("")
        engine.flush_cache()
        await trio.sleep(1)
        assert not disk.of("")
        assert await ask(engine, 0) == 0
        engine.check_integrity()


async def run_history(seed: int) -> None:
    """Ask for random answers, in engines that fail, one after the other; check each answer."""
    numbers = random.Random(seed)
    disk = FakeDisk(max_pages=numbers.choice((10, 40, 1000)))

    def script(step: int, plan: wire.Plan) -> None:
        if numbers.random() < 0.02:
            raise WorkerDies if numbers.random() < 0.3 else StepFails("a fault")

    def make() -> FakeWorker:
        return FakeWorker(
            disk=disk,
            token=next_token,
            num_pages=numbers.choice((12, 20, 40)),
            num_host_pages=numbers.choice((1, 4, 16)),
            page_size=PAGE,
            step_time=lambda plan: 0.02 + 0.002 * int(wire.ints(plan.row_counts).sum()),
            call_time=lambda call: numbers.expovariate(1 / numbers.choice((0.01, 0.1, 1.0))),
            script=script,
        )

    ask_by_chance = functools.partial(keep_asking, numbers=numbers, num_prompts=8, most_tokens=8)
    for _ in range(2):
        async with open_fake_engine(make, max_worker_restarts=1000, **OPTIONS) as engine:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(ask_by_chance, engine)
            await trio.sleep(10)
            engine.check_integrity()


@pytest.mark.parametrize("seed", range(40))
async def test_random_histories(autojump_clock: Clock, seed: int) -> None:
    await run_history(seed)


async def test_what_is_read_while_the_cache_is_emptied_is_dropped(autojump_clock: Clock) -> None:
    disk = FakeDisk()
    await fill(disk)
    make = workers(disk, call_time=lambda call: 5.0 if call.name == "read_pages" else 0.0)
    async with open_fake_engine(make, **OPTIONS) as engine:
        await trio.sleep(0.1)
        async with trio.open_nursery() as nursery:

            async def uncached() -> None:
                assert await ask(engine, 0) == 0

            nursery.start_soon(uncached)
            await trio.sleep(1)
            engine.flush_cache()
        assert engine.statistics().scheduler.pages_read == 5
        assert not disk.of("")
        engine.check_integrity()


def test_pages_are_written_once_their_copies_are_done() -> None:
    """If the plan with the copies fails, something else may be in their places."""
    cache = PrefixCache(PagePool(2, 4), 1)
    disk = DiskPages(DiskIndex(), cache)
    for token in (1, 2):
        (page,) = cache.pool.allocate(1)
        cursor = cache.publish(("",), None, [token], [page], 1, 1)
        assert cursor is not None
        cache.pool.release([page], 1)
    cache.pool.acknowledge(1)
    assert cache.evict(2) == (2, 0)
    disk.note_plan(2)
    disk.acknowledge(1)
    assert not disk.has_unwritten
    assert disk.next_write() is None
    disk.acknowledge(2)
    write = disk.next_write()
    assert write is not None
    assert len(write.places) == 1, "a transfer has one of four places on the host at most"
    assert cache.evict(0) == (0, 0)
    disk.end_write(write, [True], [])
    assert disk.index.keys == set(write.keys)


def test_workers_of_one_folder_have_one_set_of_keys() -> None:
    folders: dict[str, set[bytes]] = {}
    first, second, third = (DiskIndex(folders) for _ in range(3))
    for index in (first, second):
        index.use("old weights", [b"1", b"2"])
    first.keys.add(b"3")
    assert second.keys == {b"1", b"2", b"3"}
    # The second has other weights now; the first still has the old ones.
    second.empty("list_pages")
    assert second.keys == set()
    second.use("new weights", [b"4"])
    assert first.keys == {b"1", b"2", b"3"}
    third.use("new weights", [b"4", b"5"])
    assert second.keys == {b"4", b"5"}
    second.empty("delete_pages")
    assert (first.keys, third.keys) == ({b"1", b"2", b"3"}, set())
