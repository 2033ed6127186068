"""The culprit of workers' deaths is found, and other requests lose nothing."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduling import Bench, make_limits, make_request, reference
from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Request, Sequence, SequenceOutput
from trioserve.scheduler.fault_isolation import MAX_ALONE, MAX_KILLS, FaultIsolation
from trioserve.scheduler.recovery import STABLE_SECONDS
from trioserve.testing import FakeWorker, StepFails, WorkerDies
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine, run_fake_worker
from trioserve.workers import Link

Clock = trio.testing.MockClock

FAULT = WorkerLost("segmentation fault")
KILL = WorkerLost("kill -9", from_outside=True)


# ---- the bookkeeping


def requests(number: int, n: int = 1) -> list[Request]:
    return [make_request([1], n=n) for _ in range(number)]


def flight(*given: Request, mark: int = 10) -> dict[Sequence, int]:
    return {sequence: mark for request in given for sequence in request.sequences}


@attrs.frozen
class Row:
    """The part of a sequence's record that is read."""

    sequence: Sequence
    computed: int


def step(fault_isolation: FaultIsolation, *given: Request, computed: int = 10) -> None:
    fault_isolation.on_step(
        [Row(each, computed) for request in given for each in request.sequences]
    )  # type: ignore[misc]
    fault_isolation.check()


@pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 9, 64, 100])
@pytest.mark.parametrize("culprit", [0, -1])
def test_the_guilty_one_is_found_by_halves(number: int, culprit: int) -> None:
    fault_isolation = FaultIsolation()
    everybody = requests(number)
    poison = everybody[culprit]
    verdict = fault_isolation.on_death(flight(*everybody))
    deaths, cleared = 1, number == 1
    while verdict.culprit is None:
        running = [request for request in everybody if fault_isolation.may_run(request)]
        if poison in running:
            verdict = fault_isolation.on_death(flight(*running))
            deaths += 1
            assert verdict.culprit or verdict.narrowed or cleared
        else:
            step(fault_isolation, *running)
            cleared = True
    assert verdict.culprit is poison
    assert deaths <= 2 + math.ceil(math.log2(number))
    assert not fault_isolation.restricts
    assert fault_isolation.suspects == []


def test_who_gets_past_the_point_is_cleared_and_no_sooner() -> None:
    fault_isolation = FaultIsolation()
    one, two = requests(2)
    fault_isolation.on_death(flight(one, two))
    assert fault_isolation.probation == [one]
    step(fault_isolation, one, computed=9)
    assert fault_isolation.suspects == [one, two]
    step(fault_isolation, one)
    assert fault_isolation.probation == [two]
    step(fault_isolation, two)
    assert fault_isolation.may_run(one)
    assert fault_isolation.may_run(two)


def test_an_accident_blames_nobody() -> None:
    """Clear a request that was alone at a death and gets past its mark before the next one."""
    fault_isolation = FaultIsolation()
    (alone,) = requests(1)
    for mark in (10, 20, 30, 40):
        assert fault_isolation.on_death(flight(alone, mark=mark)).culprit is None
        step(fault_isolation, alone, computed=mark)
    # So is a request that came further, even if not past all that was in flight.
    for mark in (50, 51, 52):
        assert fault_isolation.on_death(flight(alone, mark=mark)).culprit is None
    assert fault_isolation.on_death(flight(alone, mark=52)).culprit is alone


def test_an_output_that_comes_on_excuses_its_request_for_a_while() -> None:
    fault_isolation = FaultIsolation()
    (request,) = requests(1, n=2)
    good, bad = request.sequences
    for mark in range(10, 10 + MAX_ALONE):
        assert fault_isolation.on_death({good: mark, bad: 10}).culprit is None
        fault_isolation.on_step([Row(good, mark)])  # type: ignore[list-item]
    assert fault_isolation.on_death({good: 100, bad: 10}).culprit is request


def test_who_comes_later_is_no_suspect_and_waits() -> None:
    fault_isolation = FaultIsolation()
    one, two, later = requests(3)
    fault_isolation.on_death(flight(one, two))
    assert not fault_isolation.may_run(later)
    # The earlier suspect stays the only one, whatever else was in flight.
    assert fault_isolation.on_death(flight(one, later)).narrowed
    assert fault_isolation.suspects == [one]


def test_kills_from_outside_blame_nobody_until_there_are_too_many() -> None:
    fault_isolation = FaultIsolation()
    one, two = requests(2)
    for _ in range(MAX_KILLS):
        fault_isolation.on_kill(flight(one, two))
        assert fault_isolation.suspects == []
    step(fault_isolation, one)
    fault_isolation.on_kill(flight(one, two))
    # The first one had got past it in between.
    assert fault_isolation.probation == [one]
    assert fault_isolation.suspects == [one, two]


def test_a_kill_in_between_changes_nothing() -> None:
    fault_isolation = FaultIsolation()
    one, two = requests(2)
    fault_isolation.on_death(flight(one, two))
    fault_isolation.on_kill(flight(one))
    assert fault_isolation.suspects == [one, two]
    fault_isolation.on_death({})
    fault_isolation.on_kill({})
    assert fault_isolation.suspects == [one, two]


# ---- the scheduler's core


class Poison:
    """A worker's script: it dies when certain requests get to certain lengths.

    A request is known by the first token of its prompt.
    """

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths
        self.slots: dict[int, tuple[int, int]] = {}

    def __call__(self, _: int, plan: wire.Plan) -> None:
        for slot in wire.ints(plan.closed).tolist():
            self.slots.pop(slot, None)
        for opened in plan.opened:
            self.slots[opened.slot] = (int(wire.ints(opened.tokens)[0]), opened.computed)
        counts = zip(
            wire.ints(plan.row_slots).tolist(), wire.ints(plan.row_counts).tolist(), strict=True
        )
        for slot, count in counts:
            name, computed = self.slots[slot]
            self.slots[slot] = (name, computed + count)
            if computed + count >= self.lengths.get(name, 1 << 30):
                raise WorkerDies


@attrs.define(eq=False)
class Lives:
    """A core, and one worker after the other."""

    make_worker: Callable[[], FakeWorker]
    limits: dict[str, Any]
    bench: Bench = attrs.field(init=False)
    deaths: int = 0
    most_in_a_row: int = 0
    outputs: list[SequenceOutput] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.bench = Bench.make(self.make_worker(), **self.limits)

    def run(self, accidents: dict[int, WorkerLost], reads_last: bool) -> None:
        """Until there is nothing to do. ``accidents`` are after how many plans in all."""
        bench, plans = self.bench, 0
        while True:
            core = bench.core
            plan = core.next_plan(0.0)
            core.check_integrity()
            if plan is None:
                if not bench.results:
                    return
                self.read()
                continue
            plans += 1
            loss = accidents.get(plans)
            try:
                result = bench.worker.step(plan)
            except WorkerDies:
                loss = FAULT
            else:
                assert isinstance(result, wire.StepResult)
                bench.results.append(result)
            if loss is not None:
                self.die(loss, reads_last)

    def read(self) -> None:
        self.outputs += self.bench.core.on_result(self.bench.results.pop(0), 0.0)
        self.bench.core.check_integrity()

    def die(self, loss: WorkerLost, reads_last: bool) -> None:
        """Read what the worker had sent first, or lose it with the worker."""
        bench = self.bench
        while reads_last and bench.results:
            self.read()
        bench.results.clear()
        bench.core.recovery.on_worker_lost()
        outputs, in_a_row = bench.core.recovery.judge(loss)
        self.deaths += 1
        self.most_in_a_row = max(self.most_in_a_row, in_a_row)
        self.outputs += outputs
        bench.core.check_integrity()
        bench.worker = self.make_worker()
        bench.core.recovery.restart(make_limits(bench.worker, **self.limits))


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    poisons=st.dictionaries(st.integers(0, 11), st.integers(1, 34), max_size=3),
    accidents=st.dictionaries(st.integers(1, 60), st.just(KILL), max_size=MAX_KILLS),
    fault=st.integers(1, 60),
    n=st.sampled_from([1, 1, 2]),
    reads_last=st.booleans(),
    shape=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 12),
            "max_num_batched_tokens": st.integers(1, 24),
            "num_pages": st.integers(40, 120),
        }
    ),
    limits=st.fixed_dictionaries(
        {
            "max_plans_in_flight": st.integers(1, 3),
            "enable_prefix_caching": st.booleans(),
            "capacity_policy": st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
        }
    ),
)
def test_the_poisonous_are_found_and_nobody_else(
    prompts: list[int],
    poisons: dict[int, int],
    accidents: dict[int, WorkerLost],
    fault: int,
    n: int,
    reads_last: bool,
    shape: dict[str, Any],
    limits: dict[str, Any],
) -> None:
    def make_worker() -> FakeWorker:
        return FakeWorker(page_size=4, vocab_size=100, script=Poison(poisons), **shape)

    lives = Lives(make_worker, limits)
    asked = [make_request([name] * size, max_tokens=8, n=n) for name, size in enumerate(prompts)]
    for request in asked:
        lives.bench.core.submit(request, 0.0)
    # One unexplained fault may come, and as many kills as are forgiven.
    accidents = {**accidents, fault: FAULT}
    lives.run(accidents, reads_last)
    for name, (request, size) in enumerate(zip(asked, prompts, strict=True)):
        # The last token of an output is never computed.
        is_guilty = poisons.get(name, 1 << 30) <= size + 7
        for sequence in request.sequences:
            assert sequence.finish is not None
            expected = reference(lives.bench.worker, sequence)
            if is_guilty and sequence.finish.error is not None:
                assert "the worker failed on this request" in str(sequence.finish.error)
                assert sequence.output_ids == expected[: len(sequence.output_ids)]
            else:
                assert sequence.output_ids == expected
        errors = [each.finish.error for each in request.sequences if each.finish is not None]
        assert any(errors) == is_guilty
    culprit = sum(poisons.get(name, 1 << 30) <= size + 7 for name, size in enumerate(prompts))
    bound = culprit * (3 + math.ceil(math.log2(len(prompts) + 1)) + 2 * n) + len(accidents)
    assert lives.deaths <= bound
    assert lives.most_in_a_row <= EngineConfig("fake").max_worker_restarts


# ---- the engine


def token_of(letter: str) -> int:
    token = byte_tokenizer().token_to_id(letter)
    assert token is not None
    return token


def dies_of(poison: str, **options: Any) -> Callable[[], FakeWorker]:
    """Workers that die of any step of a prompt with this text's first letter."""
    lengths = {token_of(poison): 1}
    return lambda: FakeWorker(step_time=0.01, script=Poison(lengths), **options)


async def complete_all(engine: Engine, prompts: list[str], **params: Any) -> dict[str, object]:
    """Return the tokens or the error of each request."""
    became: dict[str, object] = {}

    async def one(prompt: str) -> None:
        try:
            completion = await engine.complete(prompt, request_id=f"id-{prompt}", **params)
        except EngineError as error:
            became[prompt] = error
        else:
            became[prompt] = [output.token_ids for output in completion.outputs]

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    return became


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_poisonous_request_among_many_costs_nobody_else_anything(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    """Find it even though it kills more workers than are forgiven without progress."""
    prompts = [chr(code) * 5 for code in range(65, 97)]
    options: dict[str, Any] = {"max_plans_in_flight": depth, "max_worker_restarts": 1}
    async with open_fake_engine(lambda: FakeWorker(step_time=0.01)) as engine:
        expected = await complete_all(engine, prompts, max_tokens=20, seed=3)
    async with open_fake_engine(dies_of("M"), **options) as engine:
        with caplog.at_level(logging.WARNING):
            became = await complete_all(engine, prompts, max_tokens=20, seed=3)
        error = became.pop("MMMMM")
        assert isinstance(error, EngineError)
        assert "the worker failed on this request" in str(error)
        del expected["MMMMM"]
        assert became == expected
        assert 2 <= engine.statistics().worker_restarts <= 2 + 5
        assert "request blamed request_id='id-MMMMM'" in caplog.text
        assert caplog.text.count("request blamed") == 1
        engine.check_integrity()
        # The engine is none the worse for it.
        assert (await complete_all(engine, prompts[:3], max_tokens=20, seed=3)).items() <= (
            expected.items()
        )


async def test_the_siblings_of_the_guilty_output_end_with_it(autojump_clock: Clock) -> None:
    async with open_fake_engine(dies_of("M")) as engine:
        became = await complete_all(engine, ["MM", "AA"], max_tokens=5, n=3)
        assert isinstance(became["MM"], EngineError)
        assert len(became["AA"]) == 3  # type: ignore[arg-type]


async def test_a_plan_that_fails_is_tried_in_halves_without_a_new_worker(
    autojump_clock: Clock,
) -> None:
    def make() -> FakeWorker:
        poison = Poison({token_of("M"): 1})

        def script(steps: int, plan: wire.Plan) -> None:
            try:
                poison(steps, plan)
            except WorkerDies:
                poison.slots.clear()
                raise StepFails("no idea whose fault it is") from None

        return FakeWorker(step_time=0.01, script=script)

    prompts = [letter * 4 for letter in "ABCMDEFGH"]
    async with open_fake_engine(make) as engine:
        became = await complete_all(engine, prompts, max_tokens=9)
        assert engine.statistics().worker_restarts == 0
        assert [prompt for prompt in prompts if isinstance(became[prompt], EngineError)] == ["MMMM"]


async def test_failures_that_name_their_slot_never_cost_the_worker(autojump_clock: Clock) -> None:
    """Survive them like errors of a logits processor, however many in a row."""

    def script(_: int, plan: wire.Plan) -> None:
        for opened in plan.opened:
            if wire.ints(opened.tokens)[0] == token_of("M"):
                raise StepFails("the processor failed", slot=opened.slot)

    prompts = [f"M{number}" for number in range(9)] + ["AA"]
    async with open_fake_engine(lambda: FakeWorker(script=script)) as engine:
        became = await complete_all(engine, prompts, max_tokens=9)
        assert [key for key, value in became.items() if not isinstance(value, Exception)] == ["AA"]
        assert engine.statistics().worker_restarts == 0


@attrs.define(eq=False)
class Killer:
    """Opens fake workers, and kills them from outside."""

    make_worker: Callable[[], FakeWorker]
    killed: trio.Event = attrs.field(factory=trio.Event)

    @contextlib.asynccontextmanager
    async def open_worker(self) -> AsyncIterator[tuple[Link, wire.Ready]]:
        self.killed = trio.Event()
        try:
            async with run_fake_worker(
                self.make_worker(), EngineConfig("fake"), killed=self.killed
            ) as pair:
                yield pair
        except WorkerLost as error:
            raise WorkerLost(str(error), from_outside=self.killed.is_set()) from error


async def test_kills_from_outside_cost_nobody_anything(autojump_clock: Clock) -> None:
    killer = Killer(lambda: FakeWorker(step_time=0.01))
    async with open_fake_engine(open_worker=killer.open_worker) as engine:
        async with trio.open_nursery() as nursery:

            async def kill() -> None:
                for pause in (0.05, 0.1, 0.03, 0.2, 0.1, 0.07):
                    await trio.sleep(pause)
                    killer.killed.set()
                    await trio.sleep(0.3)

            nursery.start_soon(kill)
            became = await complete_all(engine, ["AA", "BBB"], max_tokens=80)
        assert not any(isinstance(value, Exception) for value in became.values())
        assert engine.statistics().worker_restarts >= 4


async def test_a_request_that_has_the_kernel_kill_workers_is_found(autojump_clock: Clock) -> None:
    """Treat a single kill as out of memory, and repeated kills as the request's fault."""
    killer = Killer(dies_of("M"))

    @contextlib.asynccontextmanager
    async def open_worker() -> AsyncIterator[tuple[Link, wire.Ready]]:
        try:
            async with killer.open_worker() as pair:
                yield pair
        except WorkerLost as error:
            raise WorkerLost(str(error), from_outside=True) from error

    prompts = ["AA", "BB", "MM", "CC"]
    async with open_fake_engine(open_worker=open_worker) as engine:
        became = await complete_all(engine, prompts, max_tokens=9)
        assert [prompt for prompt in prompts if isinstance(became[prompt], EngineError)] == ["MM"]
        assert 2 <= engine.statistics().worker_restarts - MAX_KILLS <= 4


async def test_who_waits_or_is_prepared_outlives_the_worker(autojump_clock: Clock) -> None:
    """In every stage before the first step: in the queue, held for a prompt, in validation."""
    asked: list[int] = []

    def make() -> FakeWorker:
        def script(steps: int, _: wire.Plan) -> None:
            if steps == 3 and len(asked) < 2:
                raise WorkerDies

        asked.append(0)
        return FakeWorker(
            step_time=0.1, call_time=0.35, script=script, max_num_seqs=2, max_num_batched_tokens=4
        )

    async with open_fake_engine(make) as engine:
        async with trio.open_nursery() as nursery:
            results: dict[str, int] = {}

            async def one(prompt: str, **params: Any) -> None:
                completion = await engine.complete(prompt, max_tokens=6, **params)
                results[prompt] = sum(len(output.token_ids) for output in completion.outputs)

            nursery.start_soon(one, "first of all")
            nursery.start_soon(lambda: one("several", n=3))
            nursery.start_soon(one, "waits for a slot")
            nursery.start_soon(lambda: one("has a grammar", grammar=Grammar("regex", "a*")))
        assert engine.statistics().worker_restarts == 1
        assert results == {
            "first of all": 6,
            "several": 18,
            "waits for a slot": 6,
            "has a grammar": 6,
        }
        engine.check_integrity()


async def kill_again_and_again(killer: Killer, times: int, pause: float) -> None:
    for _ in range(times):
        await trio.sleep(pause)
        killer.killed.set()


async def test_an_idle_worker_may_die_now_and_then(autojump_clock: Clock) -> None:
    killer = Killer(FakeWorker)
    async with open_fake_engine(open_worker=killer.open_worker) as engine:
        await kill_again_and_again(killer, times=9, pause=2 * STABLE_SECONDS)
        await trio.sleep(1)
        assert engine.statistics().worker_restarts == 9
        assert len((await engine.complete("A", max_tokens=3)).token_ids) == 3


async def test_an_idle_worker_that_dies_again_and_again_ends_the_engine(
    autojump_clock: Clock,
) -> None:
    killer = Killer(FakeWorker)
    with pytest.raises(EngineError, match="the fake worker ended"):
        async with open_fake_engine(open_worker=killer.open_worker) as engine:
            await kill_again_and_again(killer, times=9, pause=STABLE_SECONDS / 2)
    assert engine.statistics().worker_restarts == engine.config.max_worker_restarts
