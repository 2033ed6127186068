"""The scheduler's task with a fake worker over a memory link, in virtual time.

Everything that can go wrong goes wrong here: workers die and fail, requests leave in every state,
pages run out. The invariants are checked after every step.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.support.scheduling import make_request, reference, reference_logprobs, sometimes_nothing
from trioserve.config import EngineConfig
from trioserve.engine.schedulers import Schedulers
from trioserve.protocol import wire
from trioserve.protocol.errors import (
    ContextTooLong,
    EngineError,
    InvalidRequest,
    RequestAborted,
    WorkerLost,
)
from trioserve.requests.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    State,
)
from trioserve.scheduler.scheduler import Scheduler
from trioserve.testing import (
    FakeWorker,
    MemoryLink,
    StepFails,
    WorkerDies,
    memory_link_pair,
    serve_fake,
)

ABORT = Finish(FinishReason.ABORT)
STEP = 0.01


@attrs.define(eq=False)
class House:
    """A scheduler, the supervisor of its workers, and a reader of its outputs."""

    scheduler: Scheduler
    requests: trio.MemorySendChannel[Request]
    delivered: dict[Sequence, list[int]] = attrs.field(factory=dict)
    ended: dict[Sequence, trio.Event] = attrs.field(factory=dict)
    workers: list[FakeWorker] = attrs.field(factory=list)

    def send(self, *args: Any, **kwargs: Any) -> Sequence:
        """Send a request into the scheduler, as the tokenizer would; its first sequence."""
        request = make_request(*args, arrived=trio.current_time(), **kwargs)
        for sequence in request.sequences:
            sequence.move_to(State.TOKENIZING)
            self.delivered[sequence] = []
            self.ended[sequence] = trio.Event()
        self.requests.send_nowait(request)
        return request.sequences[0]

    async def finish(self, *sequences: Sequence) -> None:
        """Wait for the ends of ``sequences``."""
        for sequence in sequences:
            await self.ended[sequence].wait()

    async def read(self, outputs: trio.MemoryReceiveChannel[list[SequenceOutput]]) -> None:
        async with outputs:
            async for batch in outputs:
                self.scheduler.check_integrity()
                for output in batch:
                    self.take(output)

    def take(self, output: SequenceOutput) -> None:
        ended = self.ended[output.sequence]
        assert not ended.is_set(), "something came after the end"
        delivered = self.delivered[output.sequence]
        delivered += output.token_ids
        assert delivered == output.sequence.output_ids[: len(delivered)]
        request = output.sequence.request
        if request.prompt_logprobs is not None and output.token_ids:
            assert request.prompt_logprobs.stop >= len(request.prompt_ids)
        if output.finish is not None:
            assert output.finish is output.sequence.finish
            ended.set()

    async def supervise(self, make_worker: Callable[[], FakeWorker]) -> None:
        """Run one worker after the other."""
        while True:
            worker = make_worker()
            self.workers.append(worker)
            engine_side, worker_side = memory_link_pair()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_fake, worker, worker_side)
                try:
                    await self.scheduler.attach(engine_side, worker.ready())
                except WorkerLost:
                    engine_side.close()
            assert not self.scheduler.attached
            self.scheduler.check_integrity()
            await trio.sleep(1.0)

    async def settle(self) -> None:
        """Let the last plans be acknowledged, then assert that nothing is held."""
        await trio.sleep(100 * STEP)
        statistics = self.scheduler.statistics()
        assert statistics.pages_free + statistics.pages_cached == statistics.pages_total
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.plans_in_flight == 0
        assert self.workers[-1].slots == {}
        self.scheduler.check_integrity()


@contextlib.asynccontextmanager
async def open_house(
    make_worker: Callable[[], FakeWorker] = lambda: FakeWorker(step_time=STEP), **options: Any
) -> AsyncIterator[House]:
    scheduler = Scheduler(EngineConfig("fake", **options))
    to_scheduler, requests = trio.open_memory_channel[Request](math.inf)
    to_reader, outputs = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    house = House(scheduler, to_scheduler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Schedulers([scheduler]).run, requests, to_reader)
        nursery.start_soon(house.read, outputs)
        nursery.start_soon(house.supervise, make_worker)
        yield house
        nursery.cancel_scope.cancel()


Clock = trio.testing.MockClock


async def test_requests_are_served(autojump_clock: Clock) -> None:
    async with open_house() as house:
        sequences = [house.send([1, 2, number], max_tokens=5) for number in range(3)]
        await sequences[0].request.admitted.wait()
        await house.finish(*sequences)
        worker = house.workers[0]
        for sequence in sequences:
            assert sequence.request.rejection is None
            assert house.delivered[sequence] == reference(worker, sequence)
        times = sequences[0].request.times
        assert times.first_token == pytest.approx(STEP)
        assert times.last_token == pytest.approx(5 * STEP)
        await house.settle()


async def test_requests_wait_for_the_first_worker(autojump_clock: Clock) -> None:
    scheduler = Scheduler(EngineConfig("fake"))
    to_scheduler, requests = trio.open_memory_channel[Request](math.inf)
    to_reader, _outputs = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    house = House(scheduler, to_scheduler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Schedulers([scheduler]).run, requests, to_reader)
        waiting, leaving = house.send([1]), house.send([2])
        await trio.sleep(10)
        assert not waiting.request.admitted.is_set()
        scheduler.abort(leaving, ABORT)
        assert isinstance(leaving.request.rejection, RequestAborted)
        assert scheduler.num_waiting == scheduler.num_steps == 0
        assert scheduler.statistics().pages_total == 0
        scheduler.check_integrity()
        nursery.start_soon(house.supervise, FakeWorker)
        await waiting.request.admitted.wait()
        assert scheduler.attached
        nursery.cancel_scope.cancel()
    assert not scheduler.attached


async def test_a_request_that_cannot_be_served_is_rejected(autojump_clock: Clock) -> None:
    async with open_house() as house:
        for prompt, error in (([], InvalidRequest), ([1] * 3000, ContextTooLong)):
            sequence = house.send(prompt)
            await sequence.request.admitted.wait()
            assert isinstance(sequence.request.rejection, error)
            assert sequence.state is State.FINISHED
        await house.settle()


async def test_an_abort_wakes_an_idle_loop_and_closes_the_slot(autojump_clock: Clock) -> None:
    async with open_house(max_plans_in_flight=2) as house:
        sequence = house.send([1], max_tokens=1000)
        await trio.sleep(5 * STEP)
        house.scheduler.abort(sequence, ABORT)
        house.scheduler.abort(sequence, Finish(FinishReason.STOP))
        assert sequence.finish is ABORT
        steps = house.workers[0].num_steps
        await house.settle()
        await house.finish(sequence)
        assert house.workers[0].num_steps <= steps + 3


async def test_an_abort_is_told_at_once_if_there_is_room(autojump_clock: Clock) -> None:
    """Let the only plan in flight make the last token, so the loop is idle until the abort."""
    async with open_house(max_plans_in_flight=2) as house:
        sequence = house.send([1], max_tokens=1)
        await trio.sleep(STEP / 2)
        assert house.scheduler.statistics().plans_in_flight == 1
        house.scheduler.abort(sequence, ABORT)
        await trio.sleep(STEP / 4)
        assert house.scheduler.statistics().plans_in_flight == 2
        await house.settle()


async def test_an_abort_after_the_engine_closed_is_harmless(autojump_clock: Clock) -> None:
    async with open_house() as house:
        sequence = house.send([1], max_tokens=1000)
        await trio.sleep(5 * STEP)
    house.scheduler.abort(sequence, ABORT)
    assert sequence.finish is ABORT


async def test_requests_that_come_together_share_a_plan(autojump_clock: Clock) -> None:
    async with open_house() as house:
        await trio.sleep(1)
        sequences = [house.send([number]) for number in range(5)]
        await house.finish(*sequences)
        first_tokens = {sequence.request.times.first_token for sequence in sequences}
        assert len(first_tokens) == 1


@attrs.define(eq=False)
class FarLink:
    """A link on which every message of the engine is ``delay`` seconds under way."""

    link: MemoryLink
    delay: float

    async def send(self, message: wire.Message) -> None:
        await trio.sleep(self.delay)
        await self.link.send(message)

    async def receive(self) -> wire.Message:
        return await self.link.receive()


@pytest.mark.parametrize(("depth", "expected"), [(1, 10 * STEP + 10 * STEP / 2), (2, 10.5 * STEP)])
async def test_a_second_plan_hides_the_way_to_the_worker(
    autojump_clock: Clock, depth: int, expected: float
) -> None:
    worker = FakeWorker(step_time=STEP)
    scheduler = Scheduler(EngineConfig("fake", max_plans_in_flight=depth))
    to_scheduler, requests = trio.open_memory_channel[Request](math.inf)
    to_reader, outputs = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    house = House(scheduler, to_scheduler)
    engine_side, worker_side = memory_link_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_fake, worker, worker_side)
        nursery.start_soon(scheduler.attach, FarLink(engine_side, STEP / 2), worker.ready())
        nursery.start_soon(Schedulers([scheduler]).run, requests, to_reader)
        nursery.start_soon(house.read, outputs)
        sequence = house.send([1], max_tokens=10)
        await house.finish(sequence)
        assert trio.current_time() == pytest.approx(expected)
        assert house.delivered[sequence] == reference(worker, sequence)
        nursery.cancel_scope.cancel()


# ---- workers die


def dying_after(steps: int, **options: Any) -> Callable[[], FakeWorker]:
    """Workers of which each dies after ``steps`` steps."""

    def script(step: int, _: wire.Plan) -> None:
        if step == steps:
            raise WorkerDies

    return lambda: FakeWorker(step_time=STEP, script=script, **options)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_dead_worker_loses_nothing(autojump_clock: Clock, depth: int) -> None:
    async with open_house(dying_after(7), max_plans_in_flight=depth) as house:
        sequences = [house.send([1, 2, number], max_tokens=20) for number in range(4)]
        await house.finish(*sequences)
        assert len(house.workers) == 3
        for sequence in sequences:
            assert house.delivered[sequence] == reference(house.workers[0], sequence)


async def attach_until_lost(scheduler: Scheduler, link: MemoryLink) -> None:
    with pytest.raises(WorkerLost, match="the link is closed"):
        await scheduler.attach(link, FakeWorker().ready())


async def test_what_a_dying_worker_still_said_is_taken(autojump_clock: Clock) -> None:
    depth = 6
    scheduler = Scheduler(EngineConfig("fake", max_plans_in_flight=depth))
    to_scheduler, requests = trio.open_memory_channel[Request](math.inf)
    to_reader, outputs = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    house = House(scheduler, to_scheduler)
    engine_side, worker_side = memory_link_pair()
    worker = FakeWorker()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Schedulers([scheduler]).run, requests, to_reader)
        nursery.start_soon(house.read, outputs)
        nursery.start_soon(attach_until_lost, scheduler, engine_side)
        sequence = house.send([1], max_tokens=20)
        plans = [await worker_side.receive() for _ in range(depth)]
        # The first of these makes room for a plan that can't be sent any more.
        for plan in plans:
            assert isinstance(plan, wire.Plan)
            worker_side.send_nowait(worker.step(plan))
        worker_side.close()
        await trio.sleep(1)
        assert house.delivered[sequence] == reference(worker, sequence)[:depth]
        nursery.cancel_scope.cancel()


async def test_a_request_can_leave_while_there_is_no_worker(autojump_clock: Clock) -> None:
    async with open_house(dying_after(3)) as house:
        sequence = house.send([1], max_tokens=20)
        await trio.sleep(0.5)
        assert not house.scheduler.attached
        assert sequence.state is State.WAITING
        house.scheduler.abort(sequence, ABORT)
        await house.finish(sequence)
        newcomer = house.send([2], max_tokens=2)
        await newcomer.request.admitted.wait()
        await house.finish(newcomer)
        await house.settle()


async def test_a_failure_is_followed_by_a_reset(autojump_clock: Clock) -> None:
    failures: list[int] = []

    def script(step: int, plan: wire.Plan) -> None:
        if step == 4 and not failures:
            failures.append(plan.number)
            raise StepFails("out of luck")

    async with open_house(
        lambda: FakeWorker(step_time=STEP, script=script), max_plans_in_flight=2
    ) as house:
        sequences = [house.send([1, number], max_tokens=10) for number in range(3)]
        await house.finish(*sequences)
        assert failures
        assert len(house.workers) == 1
        for sequence in sequences:
            assert house.delivered[sequence] == reference(house.workers[0], sequence)
        await house.settle()


async def test_a_request_that_makes_every_plan_fail_is_found(autojump_clock: Clock) -> None:
    def script(_: int, plan: wire.Plan) -> None:
        for opened in plan.opened:
            if 13 in wire.ints(opened.tokens).tolist():
                raise StepFails("thirteen", slot=opened.slot)

    async with open_house(lambda: FakeWorker(step_time=STEP, script=script)) as house:
        good = house.send([1], max_tokens=30)
        await trio.sleep(3 * STEP)
        bad = house.send([13])
        await house.finish(good, bad)
        assert bad.finish is not None
        assert bad.finish.reason is FinishReason.ERROR
        with pytest.raises(EngineError, match="thirteen"):
            raise bad.finish.error or AssertionError
        assert house.delivered[good] == reference(house.workers[0], good)
        await house.settle()


async def test_a_fatal_failure_ends_the_worker(autojump_clock: Clock) -> None:
    def script(step: int, _: wire.Plan) -> None:
        if step == 4:
            raise StepFails("the device is gone", fatal=True)

    async with open_house(lambda: FakeWorker(step_time=STEP, script=script)) as house:
        sequence = house.send([1], max_tokens=6)
        await house.finish(sequence)
        assert len(house.workers) == 2
        assert house.delivered[sequence] == reference(house.workers[0], sequence)


async def test_nonsense_ends_the_worker(autojump_clock: Clock) -> None:
    scheduler = Scheduler(EngineConfig("fake"))
    engine_side, worker_side = memory_link_pair()
    await worker_side.send(wire.Quit())
    with pytest.raises(WorkerLost, match="sent Quit while serving"):
        await scheduler.attach(engine_side, FakeWorker().ready())
    assert not scheduler.attached


# ---- calls


def make_answering_worker() -> FakeWorker:
    def refuse(_: Any) -> None:
        raise ValueError("I won't")

    return FakeWorker(calls={"double": lambda number: 2 * number, "refuse": refuse})


async def test_calls(autojump_clock: Clock) -> None:
    async with open_house(make_answering_worker) as house:
        await trio.sleep(1)
        answers: dict[int, int] = {}

        async def ask(number: int) -> None:
            answers[number] = await house.scheduler.call("double", number)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
        assert answers == {number: 2 * number for number in range(5)}
        with pytest.raises(EngineError, match="refuse: I won't"):
            await house.scheduler.call("refuse")
        with pytest.raises(EngineError, match="there is no call 'sing'"):
            await house.scheduler.call("sing")


async def test_a_call_that_was_given_up_does_no_harm(autojump_clock: Clock) -> None:
    async with open_house(make_answering_worker) as house:
        await trio.sleep(1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await house.scheduler.call("double", 1)
        assert scope.cancelled_caught
        assert await house.scheduler.call("double", 2) == 4


async def test_a_call_to_a_worker_that_is_lost(autojump_clock: Clock) -> None:
    scheduler = Scheduler(EngineConfig("fake"))
    with pytest.raises(WorkerLost, match="there is no worker"):
        await scheduler.call("double")
    engine_side, worker_side = memory_link_pair()

    async def call() -> None:
        with pytest.raises(WorkerLost, match="lost before it answered 'double'"):
            await scheduler.call("double")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attach_until_lost, scheduler, engine_side)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            nursery.start_soon(call)
        worker_side.close()

    # Nothing of it reaches the next worker.
    engine_side, worker_side = memory_link_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attach_until_lost, scheduler, engine_side)
        with trio.move_on_after(1) as scope:
            await worker_side.receive()
        assert scope.cancelled_caught
        worker_side.close()


# ---- everything at once


UNLUCKY = 2
"""The seed of requests that may come to where there is no token to draw."""


def make_random_worker(rng: random.Random, shape: dict[str, int]) -> Callable[[], FakeWorker]:
    """Workers that die, fail and take their time at random."""

    def make() -> FakeWorker:
        def script(step: int, _: wire.Plan) -> None:
            if step and rng.random() < 0.01:
                raise WorkerDies
            if step and rng.random() < 0.01:
                raise StepFails("out of luck")

        return FakeWorker(
            **shape,
            vocab_size=50,
            token=sometimes_nothing(50, UNLUCKY),
            step_time=lambda _: rng.choice([0.0, 0.001, STEP]),
            computes_past_stop=rng.random() < 0.5,
            script=script,
        )

    return make


@pytest.mark.parametrize("seed", range(12))
async def test_a_day_in_the_life(autojump_clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    shape = {
        "num_pages": rng.randint(20, 60),
        "page_size": rng.choice([1, 2, 4]),
        "max_num_seqs": rng.randint(2, 12),
        "max_num_batched_tokens": rng.randint(4, 40),
    }
    room = shape["num_pages"] * shape["page_size"]
    options = {
        "max_plans_in_flight": rng.choice([1, 2, 3]),
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fcfs", "lpm", "priority"]),
        "capacity_policy": rng.choice(["max_utilization", "guaranteed_no_evict"]),
    }
    async with open_house(make_random_worker(rng, shape), **options) as house:
        sequences: list[Sequence] = []

        async def client() -> None:
            for _ in range(rng.randint(1, 6)):
                await trio.sleep(rng.expovariate(1 / (10 * STEP)))
                prompt = [1] * rng.randint(1, room // 2) + [rng.randrange(3)]
                first = house.send(
                    prompt,
                    max_tokens=rng.randint(0, room - len(prompt)),
                    stop=[rng.randrange(50)],
                    seed=rng.randrange(3),
                    priority=rng.randrange(3),
                    n=rng.choice([1, 1, 2, 5]),
                    prompt_logprobs=rng.choice([None, 0, 2]),
                )
                mine = first.request.sequences
                sequences.extend(mine)
                if rng.random() < 0.3:
                    await trio.sleep(rng.expovariate(1 / (5 * STEP)))
                    leaving = mine if rng.random() < 0.5 else rng.choices(mine)
                    for sequence in leaving:
                        house.scheduler.abort(sequence, ABORT)
                await house.finish(*mine)

        async with trio.open_nursery() as nursery:
            for _ in range(15):
                nursery.start_soon(client)
        await house.finish(*sequences)
        for sequence in sequences:
            assert_right(house, sequence)
        await trio.sleep(5)
        statistics = house.scheduler.statistics()
        assert statistics.num_waiting == statistics.num_running == statistics.pages_held == 0


def assert_right(house: House, sequence: Sequence) -> None:
    """Assert that it has the tokens of the unbatched reference so far, and so has its prompt."""
    expected = reference(house.workers[0], sequence)
    request = sequence.request
    assert sequence.finish is not None
    ended_well = sequence.finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
    if ended_well:
        assert house.delivered[sequence] == expected
    else:
        assert house.delivered[sequence] == expected[: len(sequence.output_ids)]
    if request.prompt_logprobs is not None:
        entries = request.prompt_logprobs.entries(request.prompt_ids)
        due = reference_logprobs(house.workers[0], request)
        assert entries == due if ended_well else entries == due[: len(entries)]
