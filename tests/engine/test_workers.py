"""Engines with several workers: placing, moving on a loss, and outputs that don't depend on it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.support.engines import assert_idle, facts_of, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import Engine, EngineConfig
from trioserve.protocol import wire
from trioserve.protocol.errors import CallFailed, InvalidRequest, ModelLoadError, WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker
from trioserve.testing.fake_faults import WorkerDies
from trioserve.workers import Link
from trioserve.workers.supervisor import TAKE_OVER

STEP = 0.01
CONFIG = EngineConfig("fake")


@attrs.define(eq=False)
class Workers:
    """Fake workers, in the order of their starts; each may be killed."""

    load_time: float = 0.0
    made: list[FakeWorker] = attrs.field(factory=list)
    kills: list[trio.Event] = attrs.field(factory=list)
    options: dict[str, Any] = attrs.field(factory=dict)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Link, wire.Ready]]:
        if len(self.made) >= 3:
            await trio.sleep(self.load_time)
        worker = FakeWorker(**{"step_time": STEP, **self.options})
        killed = trio.Event()
        self.made.append(worker)
        self.kills.append(killed)
        async with run_fake_worker(worker, CONFIG, killed=killed) as (link, ready):
            yield link, ready

    @property
    def num_slots(self) -> list[int]:
        return [len(worker.slots) for worker in self.made]


@contextlib.asynccontextmanager
async def open_three(**options: Any) -> AsyncIterator[tuple[Engine, Workers]]:
    workers = Workers(**{key: options.pop(key) for key in ("load_time",) if key in options})
    workers.options = options.pop("worker", {})
    async with open_fake_engine(
        open_worker=workers.open, data_parallel_size=3, **options
    ) as engine:
        yield engine, workers


def prompts(count: int) -> list[list[int]]:
    return [[20 + i, 3, 4, 5 + i] * (3 + i) for i in range(count)]


async def answers_of(engine: Engine, asked: list[list[int]], **params: Any) -> list[Any]:
    found: dict[int, Any] = {}

    async def ask(index: int, prompt: list[int]) -> None:
        completion = await engine.complete(prompt, seed=index, ignore_eos=True, **params)
        found[index] = [each.token_ids for each in completion.outputs]

    async with trio.open_nursery() as nursery:
        for index, prompt in enumerate(asked):
            nursery.start_soon(ask, index, prompt)
    return [found[index] for index in range(len(asked))]


async def test_outputs_are_those_of_one_worker(autojump_clock: object) -> None:
    asked = prompts(12)
    async with open_fake_engine(lambda: FakeWorker(step_time=STEP)) as engine:
        alone = await answers_of(engine, asked, max_tokens=20, n=2)
    async with open_three() as (engine, workers):
        assert await answers_of(engine, asked, max_tokens=20, n=2) == alone
        steps = [worker.num_steps for worker in workers.made]
        assert min(steps) > 0
        engine.check_integrity()
        # The last plan of each only closes slots.
        assert sum(steps) - 3 <= engine.statistics().scheduler.num_steps <= sum(steps)


async def test_a_killed_workers_requests_go_on_elsewhere_at_once(autojump_clock: object) -> None:
    asked = prompts(9)
    async with open_three() as (engine, _):
        alone = await answers_of(engine, asked, max_tokens=100)
    async with open_three(load_time=1000.0) as (engine, workers):
        began = trio.current_time()

        async def kill() -> None:
            await trio.sleep(0.5)
            assert min(workers.num_slots) > 0
            workers.kills[1].set()
            await trio.sleep(0.1)
            assert workers.num_slots[0] + workers.num_slots[2] == 9
            assert len(workers.made) == 3

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            disturbed = await answers_of(engine, asked, max_tokens=100)
        assert disturbed == alone
        assert trio.current_time() - began < 100 * STEP * 2
        engine.check_integrity()
        while engine.statistics().worker_restarts < 1 or len(workers.made) < 4:
            await trio.sleep(1)
        assert len(await answers_of(engine, asked, max_tokens=5)) == 9


async def test_a_request_that_ends_workers_ends_alone(autojump_clock: object) -> None:
    """It dies on its own worker again and again, and the others' requests don't notice."""
    fatal = [66] * 8

    def script(step: int, plan: wire.Plan) -> None:
        if any(list(wire.ints(each.tokens))[:8] == fatal for each in plan.opened):
            raise WorkerDies

    async with open_three(worker={"script": script}) as (engine, workers):
        found: list[Any] = []

        async def ask_fatal() -> None:
            with pytest.raises(Exception, match="failed on this request"):
                await engine.complete(fatal, max_tokens=5)
            found.append(None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_fatal)
            answers = await answers_of(engine, prompts(6), max_tokens=60)
        assert len(answers) == 6
        assert found == [None]
        await trio.sleep(2 * TAKE_OVER)
        # Two workers never died.
        assert engine.statistics().worker_restarts == len(workers.made) - 3
        engine.check_integrity()


async def test_a_worker_that_can_not_be_replaced_is_left_out(autojump_clock: object) -> None:
    workers = Workers()

    @contextlib.asynccontextmanager
    async def open_or_fail() -> AsyncIterator[tuple[Link, wire.Ready]]:
        if len(workers.made) == 3:
            raise WorkerLost("it doesn't load any more")
        async with workers.open() as opened:
            yield opened

    options = {"data_parallel_size": 3, "max_worker_restarts": 1}
    async with open_fake_engine(open_worker=open_or_fail, **options) as engine:
        expected = await answers_of(engine, prompts(9), max_tokens=50)
        async with trio.open_nursery() as nursery:

            async def kill() -> None:
                await trio.sleep(0.2)
                workers.kills[0].set()

            nursery.start_soon(kill)
            assert await answers_of(engine, prompts(9), max_tokens=50) == expected
        await trio.sleep(10)
        assert [each.state for each in engine.workers].count("ended") == 1
        assert engine.worker_life().state == "running"
        assert await answers_of(engine, prompts(9), max_tokens=50) == expected
        engine.check_integrity()
        workers.kills[1].set()
        await trio.sleep(10)
        assert await answers_of(engine, prompts(9), max_tokens=50) == expected
        assert sorted(each.state for each in engine.workers) == ["ended", "ended", "running"]


async def test_a_link_may_be_lost_any_number_of_times(autojump_clock: object) -> None:
    """The network is to blame, neither the worker nor a request."""
    workers = Workers()

    @contextlib.asynccontextmanager
    async def open_far_away() -> AsyncIterator[tuple[Link, wire.Ready]]:
        try:
            async with workers.open() as opened:
                yield opened
        except WorkerLost as error:
            raise WorkerLost(str(error), from_outside=True, reason="unreachable") from error

    options = {"data_parallel_size": 1, "max_worker_restarts": 1}
    async with open_fake_engine(open_worker=open_far_away, **options) as engine:
        alone = await answers_of(engine, prompts(3), max_tokens=50)
        for _ in range(10):
            workers.kills[-1].set()
            await trio.sleep(1)
        assert engine.statistics().worker_restarts == 10
        assert await answers_of(engine, prompts(3), max_tokens=50) == alone
        text = engine.metrics.render().decode()
        assert 'worker_losses_total{engine="0",model_name="fake",reason="unreachable"} 10' in text


async def test_workers_come_and_go_and_clients_do_not_notice(autojump_clock: object) -> None:
    async with open_three() as (engine, workers):
        alone = await answers_of(engine, prompts(9), max_tokens=100)
        sizes: list[int] = []

        async def change() -> None:
            await trio.sleep(0.2)
            await engine.remove_worker(1)
            assert 0 in workers.num_slots
            assert (await engine.add_worker()).index == 3
            sizes.append(len(engine.workers))
            await engine.remove_worker(0)
            await engine.remove_worker(2)
            sizes.append(len(engine.workers))
            with pytest.raises(InvalidRequest, match="the last worker"):
                await engine.remove_worker(3)
            with pytest.raises(InvalidRequest, match="there is no worker 1"):
                await engine.remove_worker(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            assert await answers_of(engine, prompts(9), max_tokens=100) == alone
        assert sizes == [3, 1]
        assert [(each.index, each.state) for each in engine.workers] == [(3, "running")]
        assert await answers_of(engine, prompts(4), max_tokens=100) == alone[:4]
        await engine.pause("in_place")
        with pytest.raises(InvalidRequest, match="paused"):
            await engine.add_worker()
        engine.check_integrity()


async def test_a_worker_that_does_not_load_is_not_added(autojump_clock: object) -> None:
    @contextlib.asynccontextmanager
    async def open_or_fail() -> AsyncIterator[tuple[Link, wire.Ready]]:
        if workers.made:
            raise ModelLoadError("there is no room for it")
        async with workers.open() as opened:
            yield opened

    workers = Workers()
    async with open_fake_engine(open_worker=open_or_fail) as engine:
        with pytest.raises(CallFailed, match="no worker could be added: there is no room"):
            await engine.add_worker()
        assert [each.index for each in engine.workers] == [0]
        assert len(await answers_of(engine, prompts(2), max_tokens=5)) == 2


async def test_a_prefix_is_looked_for_where_it_is(autojump_clock: object) -> None:
    document = list(range(100, 228)) * 2

    def seconds_of(plan: wire.Plan) -> float:
        return 0.005 + 1e-4 * int(wire.ints(plan.row_counts).sum())

    async with open_three(worker={"step_time": seconds_of}) as (engine, _):
        for number in range(6):
            completion = await engine.complete([*document, number], max_tokens=2)
            assert completion.usage.cached_tokens == (0 if number == 0 else 256)
        # Together, too: the first computes it, the others wait for it.
        other = [each + 1 for each in document]
        usages = []

        async def ask(number: int) -> None:
            usages.append((await engine.complete([*other, number], max_tokens=2)).usage)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, number)
        assert sorted(each.cached_tokens for each in usages) == [0, 256, 256, 256]


async def test_a_client_that_leaves_is_found_on_its_worker(autojump_clock: object) -> None:
    async with open_three() as (engine, workers):
        for number in range(6):
            with trio.move_on_after(0.2):
                await engine.complete([5, number], max_tokens=1000, ignore_eos=True)
        await trio.sleep(0.1)
        assert workers.num_slots == [0, 0, 0]
        engine.check_integrity()


KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"beam_width": 3, "n": 2, "logprobs": 1},
    {"grammar": Grammar("regex", "[a-z]+")},
    {"beam_width": 2, "grammar": Grammar("regex", "[a-z]+")},
]


async def all_kinds(engine: Engine, rng: random.Random, count: int) -> list[Any]:
    """Return everything that requests of all kinds get, which arrive over some seconds."""
    found: dict[int, Any] = {}
    documents = [[rng.randrange(97, 122) for _ in range(100)] for _ in range(3)]
    asked = [
        (rng.uniform(0, 3), rng.choice(documents)[: rng.randrange(4, 100)], rng.randrange(1, 40))
        for _ in range(count)
    ]

    async def ask(number: int) -> None:
        pause, prompt, length = asked[number]
        await trio.sleep(pause)
        params = {"seed": number, "max_tokens": length, "temperature": 0.9}
        completion = await engine.complete(prompt, **params, **KINDS[number % len(KINDS)])
        found[number] = [
            (each.token_ids, each.finish_reason, each.cumulative_logprob)
            for each in completion.outputs
        ]

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(ask, number)
    return [found[number] for number in range(count)]


@pytest.mark.parametrize("seed", range(12))
async def test_requests_of_all_kinds_outlive_their_workers(
    seed: int, autojump_clock: object
) -> None:
    """Workers are killed at random, with pages for a few requests at a time."""
    count = 30
    worker = {"num_pages": 40, "page_size": 8, "max_num_seqs": 6}
    async with open_fake_engine(lambda: FakeWorker(step_time=STEP, num_pages=200)) as engine:
        alone = await all_kinds(engine, random.Random(seed), count)
    rng = random.Random(f"kills {seed}")
    num_killed = 0
    async with open_three(worker=worker, load_time=rng.choice((0.0, 0.3, 5.0))) as (
        engine,
        workers,
    ):

        async def kill() -> None:
            nonlocal num_killed
            while True:
                await trio.sleep(rng.uniform(0.05, 0.8))
                alive = [each for each in workers.kills if not each.is_set()]
                if len(alive) > 1:
                    rng.choice(alive).set()
                    num_killed += 1
                engine.check_integrity()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            assert await all_kinds(engine, random.Random(seed), count) == alone
            nursery.cancel_scope.cancel()
        engine.check_integrity()
        assert engine.statistics().scheduler.num_running == 0
    assert num_killed > 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
async def test_real_workers_give_the_bits_of_one(name: str, tiny: Path) -> None:
    """With the compiled kernels; a worker is killed meanwhile."""
    model = tiny if name == "tiny" else Path(name)
    options = {"dtype": "bfloat16", "num_threads": 1}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "n": 2, "logprobs": 0},
        {"grammar": Grammar("regex", "(ab|cd){20,40}")},
        {"beam_width": 3, "n": 2},
    ]
    async with open_tiny_engine(model, **options) as engine:
        alone = await facts_of(engine, kinds, 8, max_tokens=40)
    async with open_tiny_engine(model, **options, data_parallel_size=2) as engine:
        assert await facts_of(engine, kinds, 8, max_tokens=40) == alone
        async with trio.open_nursery() as nursery:

            async def kill() -> None:
                while engine.statistics().scheduler.num_running < 6:
                    await trio.sleep(0.001)
                pid = engine.worker_life().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

            nursery.start_soon(kill)
            assert await facts_of(engine, kinds, 8, max_tokens=40) == alone
        while engine.statistics().worker_restarts < 1:
            await trio.sleep(0.01)
        await assert_idle(engine)
