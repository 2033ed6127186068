"""The router's view of the workers, at each placement, against what their schedulers hold."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from tests.support.scheduling import ABORT, make_request
from tests.support.step_times import learn_long_steps
from trioserve.config import EngineConfig
from trioserve.engine.routing.passed_over import PASSED_OVER
from trioserve.engine.routing.policy import Policy
from trioserve.engine.routing.router import Router
from trioserve.engine.routing.worker_load import worker_load
from trioserve.engine.schedulers import Schedulers
from trioserve.requests.request import Request, SequenceOutput, State
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.prefix_index import WorkerPages
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.sequence_state import namespace_of
from trioserve.scheduler.step_time import StepLoad
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import run_fake_worker
from trioserve.workers.supervisor import Supervisor

STEP = 0.01
SIZE = 4
BEFORE_DECODE = (State.CREATED, State.TOKENIZING, State.WAITING, State.PREFILL)


class CheckedRouter(Router):
    """A router that is compared, at each placement, with a look at every worker."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.placed: list[tuple[Request, Scheduler]] = []
        self.num_known = 0
        """Placements at which a prefix was known."""

    def place(
        self,
        request: Request,
        among: Sequence[Scheduler] | None = None,
        *,
        may_split: bool = False,
    ) -> Scheduler:
        if len(self._numbers) > 1:
            self.check(request)
        scheduler = super().place(request, among, may_split=may_split)
        self.placed = [each for each in self.placed if each[0] is not request]
        self.placed.append((request, scheduler))
        return scheduler

    def check(self, request: Request) -> None:
        """Compare the prefix, and the loads."""
        self._update()
        namespace = namespace_of(request.cache_salt, request.adapter)
        prefix, _paths = self._prefix_of(request, namespace)
        for number, worker in self._workers.items():
            on_host, cached = self.expected(request, worker.scheduler)
            found = 0 if prefix.on_host is None else prefix.on_host[number]
            assert (prefix.cached[number], found) == (cached, on_host)
            self.num_known += cached > 0
        noted = self._loads._columns.copy()
        for number, worker in self._workers.items():
            self._loads[number] = worker_load(worker.core)
        # Between the notes, only the streams' contexts and the model of the times go on.
        rows = [5, 6, 9, 11]
        assert (noted[rows] == self._loads._columns[rows]).all()

    def expected(self, request: Request, scheduler: Scheduler) -> tuple[int, int]:
        """Return the tokens on the host, and those cached or coming, as the caches have them."""
        core = scheduler.core
        assert core is not None
        namespace = namespace_of(request.cache_salt, request.adapter)
        match = core.memory.prefix.match(namespace, request.prompt_column(), core.next_number)
        on_host = match.num_on_host * SIZE
        cached = len(match.nodes) * SIZE
        coming = max(
            (
                common(request, other)
                for other, at in self.placed
                if at is scheduler and is_coming(other)
            ),
            default=0,
        )
        return (0, coming) if coming > cached else (on_host, cached - on_host)


def is_coming(request: Request) -> bool:
    """Return True if its prompt is still to be computed; after a preemption the router knows."""
    (sequence,) = request.sequences
    if sequence.history is not None:
        return request.coming is not None
    return sequence.state in BEFORE_DECODE


def common(one: Request, other: Request) -> int:
    """Return the tokens in whole pages that ``one`` will find of ``other``."""
    if (one.cache_salt, one.adapter) != (other.cache_salt, other.adapter):
        return 0
    most = min((len(one.prompt_ids) - 1) // SIZE, len(other.prompt_ids) // SIZE)
    pages = range(most + 1)
    same = [n * SIZE for n in pages if one.prompt_ids[: n * SIZE] == other.prompt_ids[: n * SIZE]]
    return max(same)


class Several(Schedulers):
    """Schedulers with fake workers, and a router that is checked."""

    def __init__(self, number: int, config: EngineConfig, **worker: Any) -> None:
        self.config = config
        self.worker = worker
        self.workers: list[list[FakeWorker]] = []
        super().__init__([self.make() for _ in range(number)])
        self.router = self.placement._router = CheckedRouter(Policy())
        for each in self:
            self.router.add(each)
        self.to_self, self.requests = trio.open_memory_channel[Request](math.inf)

    def make(self) -> Scheduler:
        self.workers.append([])
        return Scheduler(self.config)

    async def start(self, nursery: trio.Nursery, scheduler: Scheduler, index: int) -> None:
        """Start a scheduler's worker."""

        def open_worker() -> Any:
            host = 12 if index == 0 else 0
            worker = FakeWorker(step_time=STEP, num_host_pages=host, **self.worker)
            self.workers[index].append(worker)
            return run_fake_worker(worker, self.config)

        supervisor = Supervisor(
            open_worker=open_worker, max_restarts=9, judge=scheduler.judge,
            worker_power=scheduler.worker_power,
        )  # fmt: skip
        await nursery.start(supervisor.run, scheduler.attach)

    def send(self, prompt: Sequence[int], **options: Any) -> Request:
        """Send a request."""
        adapter = options.pop("adapter", 0)
        request = make_request(prompt, arrived=trio.current_time(), **options)
        request.adapter = adapter
        request.sequences[0].move_to(State.TOKENIZING)
        self.to_self.send_nowait(request)
        return request


@contextlib.asynccontextmanager
async def open_several(
    number: int, config: EngineConfig | None = None, **worker: Any
) -> AsyncIterator[tuple[Several, trio.Nursery]]:
    options = {"page_size": SIZE, "num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    several = Several(number, config or EngineConfig("fake"), **{**options, **worker})
    to_reader, _outputs = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    async with trio.open_nursery() as nursery:
        for index, scheduler in enumerate(several):
            await several.start(nursery, scheduler, index)
        nursery.start_soon(several.run, several.requests, to_reader)
        yield several, nursery
        several.check_integrity()
        nursery.cancel_scope.cancel()


def random_prompt(rng: random.Random) -> list[int]:
    """Return a prompt that begins like many others."""
    system = [7] * rng.choice([4, 12, 24])
    return [*system, *(rng.randrange(2) for _ in range(rng.randrange(1, 30)))]


async def place_many(seed: int) -> None:
    """Place requests, while caches are emptied and workers come, go and are lost."""
    rng = random.Random(seed)
    async with open_several(3) as (several, nursery):
        sent: list[Request] = []
        for number in range(300):
            await trio.sleep(rng.choice([0, 0, 0.3 * STEP, 2 * STEP, 5 * STEP]))
            salt = rng.choice(["", "", "salt"])
            sent.append(several.send(random_prompt(rng), salt=salt, max_tokens=rng.randrange(12)))
            match rng.randrange(60):
                case 0:
                    several[rng.randrange(len(tuple(several)))].report_fault("a test")
                case 1:
                    for each in several:
                        each.pause_control.flush_prefixes()
                case 2 | 3 | 4:
                    several.abort(rng.choice(sent[-9:]).sequences[0], ABORT)
            if number == 100:
                added = several.make()
                await several.start(nursery, added, 3)
                several.add(added)
            if number == 200:
                first = several[1]
                with several.placement.retiring(first):
                    several.placement.move_requests(first)
                    first.pause_control.close("test", retract=True)
                    await first.pause_control.wait_drained()
                    several.placement.move_requests(first)
                    first.pause_control.resume("test")
        await trio.sleep(500 * STEP)
        assert all(each.ended for each in sent)
        assert several.router.num_known > 200
        for each in several:
            each.pause_control.flush_prefixes()
        assert several.router._index.is_empty, "a prompt is still expected"


@pytest.mark.parametrize("seed", range(2))
async def test_the_router_knows_what_the_workers_have(seed: int, autojump_clock: object) -> None:
    await place_many(seed)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (WorkerPages, "on_added"),
        (WorkerPages, "on_moved"),
        (WorkerPages, "on_removed"),
        (WorkerPages, "forget"),
        (Feeds, "note_load"),
    ],
)
async def test_a_lost_event_is_found(
    owner: type, name: str, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second event of a kind is lost: pages that come, move or go, or a load that changes."""
    original, calls = getattr(owner, name), itertools.count()

    def losing(self: Any, *args: Any, **more: Any) -> None:
        if next(calls) % 2:
            original(self, *args, **more)

    monkeypatch.setattr(owner, name, losing)
    with pytest.RaisesGroup(AssertionError, flatten_subgroups=True):
        await place_many(0)
    assert next(calls) > 1


async def test_pages_that_a_session_pins_attract_its_next_turn(autojump_clock: object) -> None:
    async with open_several(3, max_num_seqs=8) as (several, _nursery):
        turn = several.send([5] * 40, max_tokens=4)
        await trio.sleep(20 * STEP)
        home = several.for_request(turn)
        tokens = [*turn.prompt_ids, *turn.sequences[0].output_ids]
        several.pins.pin("session", tokens, 80, salt="", adapter=0)
        # Others take all pages that aren't pinned.
        for number in range(30):
            several.send([number + 10] * 60, max_tokens=1)
            await trio.sleep(8 * STEP)
        following = several.send([*tokens, 6, 6, 6], max_tokens=1)
        await trio.testing.wait_all_tasks_blocked()
        assert several.for_request(following) is home
        assert following.num_cached_when_placed == 40


async def test_a_worker_that_looks_slow_is_tried_again(autojump_clock: object) -> None:
    async with open_several(2) as (several, _nursery):
        several.placement._router = router = Router(Policy())
        for each in several:
            router.add(each)

        async def placed(count: int) -> int:
            """Return how many of so many requests, one after the other, the second worker gets."""
            found = 0
            for _ in range(count):
                request = several.send([1, 2, 3], max_tokens=9)
                await trio.sleep(20 * STEP)
                found += several.for_request(request) is second
            return found

        _first, second = several
        assert await placed(20) > 0
        assert second.core is not None
        learn_long_steps(second.core.step_times)
        await placed(1)
        assert await placed(PASSED_OVER) == 0
        # It is chosen once, and its steps show its true times.
        assert second.core.step_times.predict(StepLoad(decodes=1)) > 1
        assert await placed(3 * PASSED_OVER) > 0
        assert second.core.step_times.predict(StepLoad(decodes=1)) < 2 * STEP


async def test_a_worker_with_the_adapter_is_taken_until_the_others_have_it(
    autojump_clock: object,
) -> None:
    config = EngineConfig("fake", enable_lora=True, max_cpu_loras=8)
    async with open_several(2, config, call_time=0.5) as (several, _nursery):
        await several.adapters.load("poet", "/poet")
        first, second = several
        assert first.core is not None
        assert second.core is not None
        assert first.core.residency.load_seconds == pytest.approx(0.5)
        first.core.residency.on_unload(1)
        requests = [several.send([n] * 9, adapter=1, max_tokens=1) for n in range(4)]
        await trio.sleep(0.1)
        assert {several.for_request(each) for each in requests} == {second}


def test_a_choice_among_some() -> None:
    router = Router(Policy())
    schedulers = [Scheduler(EngineConfig("fake")) for _ in range(2)]
    for each in schedulers:
        router.add(each)
    request = make_request([1, 2, 3])
    # None of them has had a worker.
    assert router.place(request) is schedulers[0]
    assert router.place(request, schedulers[1:]) is schedulers[1]
    router.remove(schedulers[0])
    assert router.place(request) is schedulers[1]
    assert np.isfinite(request.num_cached_when_placed)
