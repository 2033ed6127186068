"""Adapters that a worker holds: few places, many adapters, and no request waits for ever."""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve import AdapterNotFound, Engine, InvalidRequest, ModelLoadError
from trioserve.config import EngineConfig
from trioserve.protocol.errors import WorkerLost
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import Plan, Ready
from trioserve.scheduler.adapter_residency import LoadAdapter, Residency, UnloadAdapter
from trioserve.testing import FakeWorker, WorkerDies, adapter_shift, hashed_token
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker
from trioserve.workers import Link

TOKENS = 12


def test_brings_what_is_asked_for_and_keeps_what_was_used_last() -> None:
    residency = Residency(most=2, most_together=2)
    for number in (1, 2):
        residency.ask(number)
        assert residency.next_change(set) == LoadAdapter(number)
        residency.on_loaded(number)
    assert residency.next_change(set) is None
    assert residency.begin_pass(set).admits(1)
    residency.clear_places()
    residency.ask(3)
    assert residency.next_change(lambda: {1, 2}) is None  # both are in use
    assert residency.next_change(set) == UnloadAdapter(2)
    residency.on_unload(2)
    assert residency.next_change(set) == LoadAdapter(3)
    residency.on_loaded(3)
    residency.forget(1)
    assert residency.wants_change
    assert residency.next_change(set) == UnloadAdapter(1)
    residency.on_worker_lost()  # before it was told so
    assert residency.next_change(set) == LoadAdapter(3)
    residency.on_loaded(3)
    assert residency.next_change(set) is None


def test_who_finds_no_place_holds_those_behind_back() -> None:
    residency = Residency(most=2, most_together=1)
    for number in (1, 2, 3):
        residency.ask(number)
    for number in (1, 2):
        residency.on_loaded(number)
    look = residency.begin_pass(lambda: {0, 1})
    assert [look.admits(number) for number in (1, 0, 2, 1, 0)] == [True, True, False, False, True]
    look = residency.begin_pass(lambda: {1})
    assert [look.admits(number) for number in (3, 1, 2)] == [False, True, False]
    assert residency.next_change(lambda: {1}) == UnloadAdapter(2)


@settings(max_examples=200, deadline=None)
@given(
    most=st.integers(1, 4),
    data=st.data(),
    line=st.lists(st.integers(0, 6), max_size=40),
    seats=st.integers(1, 6),
)
def test_everybody_gets_in(most: int, data: st.DataObject, line: list[int], seats: int) -> None:
    """Sequences that run for a while, in the order of a line, over a worker with few places."""
    residency = Residency(most, data.draw(st.integers(1, most)))
    for number in range(1, 7):
        residency.ask(number)
    waiting, present = list(line), set[int]()
    running: deque[int] = deque()

    def adapters() -> set[int]:
        return set(running)

    for round_ in range(10 * len(line) + 50):
        look = residency.begin_pass(adapters)
        for number in list(waiting):
            if len(running) < seats and look.admits(number):
                waiting.remove(number)
                running.append(number)
                assert number == 0 or number in present
        assert len(adapters() - {0}) <= residency.most_together
        change = residency.next_change(adapters)
        if isinstance(change, LoadAdapter):
            assert change.number not in present
            present.add(change.number)
            residency.on_loaded(change.number)
        elif isinstance(change, UnloadAdapter):
            assert change.number not in running
            present.remove(change.number)
            residency.on_unload(change.number)
        assert len(present) <= most
        if running and (round_ % 3 == 0 or data.draw(st.booleans())):
            running.popleft()
    assert not waiting


def expected(worker: FakeWorker, prompt: list[int], path: str, count: int = TOKENS) -> list[int]:
    """Return a fake worker's tokens for ``prompt`` with the adapter at ``path``."""
    tokens = list(prompt)
    function = hashed_token(worker.vocab_size)
    for _ in range(count):
        token = function(tokens, SamplerParams(seed=1))
        tokens.append((token + (adapter_shift(path) if path else 0)) % worker.vocab_size)
    return tokens[len(prompt) :]


async def ask(engine: Engine, name: str, prompt: list[int], **options: Any) -> list[int]:
    completion = await engine.complete(
        prompt, adapter=name, **{"max_tokens": TOKENS, "seed": 1, **options}
    )
    return list(completion.token_ids)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("most", "together"), [(1, 1), (2, 1), (3, 2)])
async def test_many_adapters_over_few_places(
    autojump_clock: trio.abc.Clock, most: int, together: int, depth: int
) -> None:
    """More in use than the worker holds: they take turns, and each gets its own tokens."""

    def worker() -> FakeWorker:
        return FakeWorker(
            step_time=0.01, call_time=0.03, max_loras=together, max_cpu_loras=most, num_pages=64
        )

    names = [f"adapter-{number}" for number in range(6)]
    async with open_fake_engine(
        worker,
        lora_modules=[f"{name}=/adapters/{name}" for name in names],
        max_loras=together,
        max_cpu_loras=most,
        max_plans_in_flight=depth,
    ) as engine:
        found: dict[tuple[str, int], list[int]] = {}

        async def client(name: str, number: int) -> None:
            await trio.sleep(0.005 * number)
            prompt = [number % 3 + place for place in range(20)]
            found[name, number] = await ask(engine, name, prompt)
            engine.check_integrity()

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(client, ["", *names][number % 7], number)
        for (name, number), tokens in found.items():
            prompt = [number % 3 + place for place in range(20)]
            path = f"/adapters/{name}" if name else ""
            assert tokens == expected(worker(), prompt, path)
        engine.check_integrity()


async def test_a_stream_of_others_doesn_t_keep_one_out(autojump_clock: trio.abc.Clock) -> None:
    async with open_fake_engine(
        lambda: FakeWorker(step_time=0.01, max_loras=1, max_cpu_loras=1),
        lora_modules=["a=/a", "b=/b"],
        max_loras=1,
        max_cpu_loras=1,
    ) as engine:

        async def clients() -> None:
            while True:
                nursery.start_soon(ask, engine, "a", [1, 2, 3])
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clients)
            await trio.sleep(1)
            with trio.fail_after(2):
                assert await ask(engine, "b", [1, 2]) == expected(FakeWorker(), [1, 2], "/b")
            nursery.cancel_scope.cancel()


async def test_deaths_of_the_worker(autojump_clock: trio.abc.Clock) -> None:
    """Load every adapter on each new worker before a sequence resumes with it."""
    made: list[FakeWorker] = []

    def worker() -> FakeWorker:
        number = len(made)

        def script(step: int, plan: Plan) -> None:
            if step == 7 and number < 3:
                raise WorkerDies

        made.append(FakeWorker(step_time=0.01, call_time=0.02, script=script))
        return made[-1]

    async with open_fake_engine(
        worker, lora_modules=["a=/a", "b=/b", "c=/c"], max_worker_restarts=10
    ) as engine:
        results: dict[str, list[int]] = {}

        async def client(name: str) -> None:
            results[name] = await ask(engine, name, [4, 5, 6], max_tokens=40)

        async with trio.open_nursery() as nursery:
            for name in ("", "a", "b"):
                nursery.start_soon(client, name)
        for name, tokens in results.items():
            path = f"/{name}" if name else ""
            assert tokens == expected(FakeWorker(), [4, 5, 6], path, 40)
        assert engine.statistics().worker_restarts == 3
        await trio.sleep(1)
        assert sorted(made[-1].adapters.values()) == ["/a", "/b", "/c"]


async def test_unload_waits_for_its_readers(autojump_clock: trio.abc.Clock) -> None:
    worker = FakeWorker(step_time=0.01)
    async with open_fake_engine(lambda: worker, lora_modules=["a=/a"]) as engine:
        async with engine.generate([1, 2, 3], adapter="a", max_tokens=50, seed=1) as stream:
            await anext(stream)
            with trio.move_on_after(0.05) as scope:
                await engine.unload_adapter("a")
            assert scope.cancelled_caught  # the wait is over, the unloading isn't
            assert worker.adapters == {1: "/a"}
            with pytest.raises(AdapterNotFound):
                await ask(engine, "a", [1])
            with pytest.raises(AdapterNotFound):
                await engine.unload_adapter("a")
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert len(tokens) >= 40
        await trio.sleep(0.1)
        assert worker.adapters == {}
        await engine.load_adapter("a", "/a")
        assert worker.adapters == {2: "/a"}
        # Its readers may also leave before their end.
        async with trio.open_nursery() as nursery:
            async with engine.generate([1, 2, 3], adapter="a", max_tokens=2000) as stream:
                await anext(stream)
                nursery.start_soon(engine.unload_adapter, "a")
                await trio.sleep(0.05)
                assert worker.adapters == {2: "/a"}
        await trio.sleep(0.1)
        assert worker.adapters == {}
        engine.check_integrity()


async def test_a_prefix_is_found_by_its_own_load_only(autojump_clock: trio.abc.Clock) -> None:
    prompt = list(range(40))

    async def cached(engine: Engine, name: str) -> int:
        completion = await engine.complete(prompt, adapter=name, max_tokens=1)
        return completion.usage.cached_tokens

    async with open_fake_engine(lora_modules=["a=/a", "b=/b"]) as engine:
        assert [await cached(engine, name) for name in ("", "a", "b")] == [0, 0, 0]
        assert [await cached(engine, name) for name in ("", "a", "b")] == [32, 32, 32]
        assert engine.statistics().scheduler.pages_cached == 6
        await engine.unload_adapter("a")
        engine.check_integrity()
        assert engine.statistics().scheduler.pages_cached == 4
        await engine.load_adapter("a", "/a")
        assert [await cached(engine, name) for name in ("", "a", "b")] == [32, 0, 32]


async def test_loads_that_fail(autojump_clock: trio.abc.Clock) -> None:
    async with open_fake_engine(enable_lora=True) as engine:
        with pytest.raises(InvalidRequest, match="/bad is bad") as caught:
            await engine.load_adapter("a", "/bad")
        assert caught.value.param == "path"
        await engine.load_adapter("a", "/a")
        assert await ask(engine, "a", [1, 2]) == expected(FakeWorker(), [1, 2], "/a")
    with pytest.raises(ModelLoadError, match="the adapter 'b' can't be loaded: /bad-b is bad"):
        async with open_fake_engine(lora_modules=["b=/bad-b"]):
            pass


async def test_a_load_that_is_given_up_leaves_nothing(autojump_clock: trio.abc.Clock) -> None:
    given_up = trio.CancelScope()
    worker = FakeWorker(call_time=lambda call: given_up.cancel() or 1.0)
    async with open_fake_engine(lambda: worker, enable_lora=True) as engine:
        with given_up:
            await engine.load_adapter("a", "/a")
        assert given_up.cancelled_caught
        assert engine.adapters == ()
        await engine.load_adapter("a", "/b")
        await trio.sleep(5)
        assert worker.adapters == {2: "/b"}


async def test_the_worker_dies_while_it_loads(autojump_clock: trio.abc.Clock) -> None:
    """Report the failure to the caller of the load; a possible culprit isn't loaded again."""
    made: list[FakeWorker] = []
    loads, killed = trio.Event(), trio.Event()

    def worker() -> FakeWorker:
        made.append(FakeWorker(call_time=lambda call: loads.set() or 1.0))
        return made[-1]

    config = EngineConfig("fake", enable_lora=True)
    async with open_fake_engine(
        open_worker=lambda: run_fake_worker(worker(), config, killed=killed), enable_lora=True
    ) as engine:
        async with trio.open_nursery() as nursery:

            async def load() -> None:
                with pytest.raises(WorkerLost, match="lost while it loaded"):
                    await engine.load_adapter("a", "/a")

            nursery.start_soon(load)
            await loads.wait()
            killed.set()
            killed = trio.Event()
        await trio.sleep(5)
        assert engine.healthy
        assert made[-1].adapters == {}
        await engine.load_adapter("a", "/a")
        assert await ask(engine, "a", [1, 2]) == expected(FakeWorker(), [1, 2], "/a")


@pytest.mark.parametrize("seed", range(25))
async def test_random_lives(autojump_clock: trio.abc.Clock, seed: int) -> None:
    """Load and unload adapters, lose workers and cancel clients: all tokens delivered are right."""
    choose = random.Random(seed)
    together = choose.randint(1, 3)
    most = choose.randint(together, 4)
    made: list[FakeWorker] = []
    sizes = {
        "num_pages": choose.choice((12, 64)),
        "max_num_seqs": choose.choice((2, 8)),
        "max_num_batched_tokens": choose.choice((16, 64)),
    }
    kill = trio.Event()
    config = EngineConfig("fake")

    def open_worker() -> contextlib.AbstractAsyncContextManager[tuple[Link, Ready]]:
        nonlocal kill
        kill = trio.Event()
        made.append(
            FakeWorker(
                step_time=0.01,
                call_time=choose.choice((0.0, 0.005, 0.1)),
                max_loras=together,
                max_cpu_loras=most,
                **sizes,
            )
        )
        return run_fake_worker(made[-1], config, killed=kill)

    async with open_fake_engine(
        open_worker=open_worker,
        enable_lora=True,
        max_loras=together,
        max_cpu_loras=most,
        max_plans_in_flight=choose.choice((1, 2)),
        scheduling_policy=choose.choice(("fcfs", "lpm", "priority")),
        enable_prefix_caching=choose.random() < 0.7,
        max_worker_restarts=100,
    ) as engine:
        finished = 0

        async def load(name: str, version: int) -> None:
            with contextlib.suppress(InvalidRequest, WorkerLost):
                await engine.load_adapter(name, f"/{name}/{version}")

        async def unload(name: str) -> None:
            with contextlib.suppress(AdapterNotFound):
                await engine.unload_adapter(name)

        async def client(name: str, number: int) -> None:
            nonlocal finished
            prompt = [number % 3 + place for place in range(choose.choice((5, 20, 40)))]
            path = {adapter.name: adapter.path for adapter in engine.adapters}.get(name, "")
            with trio.move_on_after(choose.choice((0.05, math.inf, math.inf))):
                try:
                    tokens = await ask(
                        engine,
                        name,
                        prompt,
                        priority=choose.randrange(3),
                        max_tokens=choose.choice((1, 10, 40)),
                    )
                except AdapterNotFound:
                    return
                assert tokens == expected(made[0], prompt, path, len(tokens))
                finished += 1
            engine.check_integrity()

        async with trio.open_nursery() as nursery:
            for number in range(60):
                name = choose.choice("abcdef")
                match choose.randrange(6):
                    case 0:
                        nursery.start_soon(unload, name)
                    case 1 | 2:
                        nursery.start_soon(load, name, number)
                    case _:
                        name = choose.choice(["", *(each.name for each in engine.adapters)])
                        nursery.start_soon(client, name, number)
                await trio.sleep(choose.choice((0.0, 0.0, 0.01, 0.2)))
                if choose.random() < 0.05:
                    kill.set()
        assert finished > 5
        engine.check_integrity()
        for adapter in engine.adapters:
            await engine.unload_adapter(adapter.name)
        await trio.sleep(2)
        assert engine.statistics().scheduler.pages_held == 0
        assert made[-1].adapters == {}
