"""Two schedulers as one: what works over all of them does so for each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.support.prompt_adapters import write_prefix_adapter, write_prompt_adapter
from tests.support.scheduling import ABORT, make_request
from trioserve.config import EngineConfig
from trioserve.engine.control import Control
from trioserve.engine.idle_check import IdleCheck
from trioserve.engine.schedulers import Schedulers
from trioserve.observability.live.prefix import IDS_FOR_EACH, prefix_of_all
from trioserve.observability.scheduler_statistics import SchedulerStatistics, sum_of
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, InvalidRequest, WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Request, Sequence, SequenceOutput, State
from trioserve.scheduler.scheduler import Scheduler
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import run_fake_worker
from trioserve.testing.fake_model import EMBEDDING_WIDTH, KV_SHAPE
from trioserve.text.worker_validation import WorkerValidation
from trioserve.workers.supervisor import Supervisor

CONFIG = EngineConfig("fake")
STEP = 0.01


class Pair(Schedulers):
    """Two schedulers; a request names its own by its priority."""

    def __init__(self, schedulers: list[Scheduler]) -> None:
        super().__init__(schedulers)
        placement: Any = self.placement
        placement.place = lambda request: self[request.priority]


@attrs.define(eq=False)
class Two:
    """A pair of schedulers that run, and their workers."""

    pair: Pair
    workers: list[list[FakeWorker]]
    """The workers of each scheduler so far."""
    requests: trio.MemorySendChannel[Request]

    def send(self, index: int, prompt: list[int], **options: Any) -> Sequence:
        """Send a request for the scheduler of that index; return its sequence."""
        request = make_request(prompt, priority=index, arrived=trio.current_time(), **options)
        (sequence,) = request.sequences
        sequence.move_to(State.TOKENIZING)
        self.requests.send_nowait(request)
        return sequence

    @property
    def num_running(self) -> list[int]:
        return [each.statistics().num_running for each in self.pair]


def slow(**options: Any) -> FakeWorker:
    return FakeWorker(step_time=STEP, **options)


@contextlib.asynccontextmanager
async def open_two(
    first: Callable[[], FakeWorker] = slow, second: Callable[[], FakeWorker] = slow
) -> AsyncIterator[Two]:
    workers: list[list[FakeWorker]] = [[], []]
    to_pair, requests = trio.open_memory_channel[Request](math.inf)
    to_reader, _outputs = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    async with trio.open_nursery() as nursery:
        schedulers = []
        for index, make in enumerate((first, second)):
            scheduler = Scheduler(CONFIG)

            def open_worker(index: int = index, make: Callable[[], FakeWorker] = make) -> Any:
                workers[index].append(make())
                return run_fake_worker(workers[index][-1], CONFIG)

            supervisor = Supervisor(
                open_worker=open_worker,
                max_restarts=3,
                judge=scheduler.judge,
                worker_power=scheduler.worker_power,
            )
            schedulers.append(scheduler)
            await nursery.start(supervisor.run, scheduler.attach)
        two = Two(Pair(schedulers), workers, to_pair)
        nursery.start_soon(two.pair.run, requests, to_reader)
        await two.pair.wait_attached()
        yield two
        two.pair.check_integrity()
        nursery.cancel_scope.cancel()


async def test_a_worker_may_be_added_before_the_first_one_serves(autojump_clock: object) -> None:
    async with open_two() as two:
        schedulers = Schedulers([Scheduler(CONFIG)])
        schedulers.add(two.pair[0])
        assert two.pair[0] in list(schedulers)
        assert not schedulers.paused


async def test_idle_means_that_both_are(autojump_clock: object) -> None:
    async with open_two() as two:
        noted: list[bool] = []
        two.pair.notify_idle(lambda: noted.append(two.pair.idle))
        two.send(0, [1, 2, 3], max_tokens=4)
        two.send(1, [1, 2, 3], max_tokens=8)
        await trio.sleep(2.5 * STEP)
        assert two.num_running == [1, 1]
        assert not two.pair.idle
        await trio.sleep(4 * STEP)
        assert [each.idle for each in two.pair] == [True, False]
        assert not two.pair.idle
        await trio.sleep(6 * STEP)
        assert two.pair.idle
        assert noted == [False, True]


async def test_numbers_are_summed(autojump_clock: object) -> None:
    async with open_two(lambda: slow(max_num_seqs=1), lambda: slow(max_num_seqs=1)) as two:
        for index, count in enumerate((2, 3)):
            for _ in range(count):
                two.send(index, [1, 2, 3], tenant="a", max_tokens=5)
        await trio.sleep(1.5 * STEP)
        pair = two.pair
        assert two.num_running == [1, 1]
        assert (pair.num_waiting, pair.num_waiting_tokens) == (3, 9)
        assert pair.waiting_of("a") == (3, 9)
        statistics = pair.statistics()
        assert (statistics.num_running, statistics.num_waiting) == (2, 3)
        assert statistics.pages_total == 512
        await trio.sleep(30 * STEP)
        assert pair.statistics().num_tokens_sampled == 25
        assert pair.num_attached == 2


def test_the_names_of_adapters_are_joined() -> None:
    first = SchedulerStatistics(num_steps=1, running_adapters=("b", "c"))
    second = SchedulerStatistics(num_steps=2, running_adapters=("a", "b"))
    total = sum_of([first, second])
    assert (total.num_steps, total.running_adapters) == (3, ("a", "b", "c"))
    assert sum_of([first]) == first


async def test_an_abort_reaches_the_scheduler_of_the_request(autojump_clock: object) -> None:
    async with open_two() as two:
        first, second = two.send(0, [1], max_tokens=100), two.send(1, [1], max_tokens=100)
        await trio.sleep(2.5 * STEP)
        two.pair.abort(second, ABORT)
        assert first.state is not State.FINISHED
        assert second.state is State.FINISHED
        await trio.sleep(3 * STEP)
        assert two.num_running == [1, 0]
        assert two.pair[1].idle


# ---- operators' calls


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_pauses_both(mode: str, autojump_clock: object) -> None:
    async with open_two() as two:
        control = Control(two.pair, [])
        sequences = [two.send(index, [1, 2], max_tokens=50) for index in (0, 1)]
        await trio.sleep(3.5 * STEP)
        await control.pause(mode, refuse=False)
        assert two.pair.paused
        assert two.num_running == ([0, 0] if mode == "retract" else [1, 1])
        lengths = [len(each.output_ids) for each in sequences]
        await trio.sleep(10 * STEP)
        assert [len(each.output_ids) for each in sequences] == lengths
        control.resume()
        assert not two.pair.paused
        await trio.sleep(60 * STEP)
        assert [len(each.output_ids) for each in sequences] == [50, 50]


async def test_a_pause_when_done_waits_for_both(autojump_clock: object) -> None:
    async with open_two() as two:
        sequences = [two.send(0, [1], max_tokens=3), two.send(1, [1], max_tokens=20)]
        await trio.sleep(1.5 * STEP)
        with trio.move_on_after(10 * STEP) as scope:
            await two.pair.pause_when_done("test")
        assert scope.cancelled_caught
        assert sequences[0].state is State.FINISHED
        # The scheduler whose requests had finished isn't held back, either.
        later = two.send(0, [1], max_tokens=1)
        await trio.sleep(3 * STEP)
        assert later.state is State.FINISHED
        await two.pair.pause_when_done("test")
        assert sequences[1].state is State.FINISHED
        assert two.pair.paused
        held = [two.send(index, [1], max_tokens=1) for index in (0, 1)]
        await trio.sleep(3 * STEP)
        assert {each.state for each in held} == {State.WAITING}
        two.pair.resume("test")
        await trio.sleep(3 * STEP)
        assert {each.state for each in held} == {State.FINISHED}


async def test_memory_is_released_by_both(autojump_clock: object) -> None:
    async with open_two() as two:
        control = Control(two.pair, [])
        sequences = [two.send(index, [1, 2], max_tokens=20) for index in (0, 1)]
        await trio.sleep(5 * STEP)
        assert not control.memory_released
        await control.release_memory()
        assert control.memory_released
        assert [each.attached for each in two.pair] == [False, False]
        await control.resume_memory()
        assert not control.memory_released
        assert [len(each) for each in two.workers] == [2, 2]
        await trio.sleep(60 * STEP)
        assert [len(each.output_ids) for each in sequences] == [20, 20]


async def test_all_caches_are_flushed(autojump_clock: object) -> None:
    async with open_two() as two:
        for index in (0, 1):
            two.send(index, [index] * 40, max_tokens=1)
        await trio.sleep(5 * STEP)
        assert two.pair.statistics().pages_cached == 4
        assert Control(two.pair, []).flush_cache() == 4
        assert two.pair.statistics().pages_cached == 0


# ---- adapters


async def test_an_adapter_that_fails_in_one_is_in_none(autojump_clock: object) -> None:
    def refuse(_: object) -> Any:
        raise ValueError("no room")

    calls: dict[str, Callable[[Any], Any]] = {"load_adapter": refuse}
    async with open_two(second=lambda: slow(calls=calls)) as two:
        adapters = two.pair.adapters
        with pytest.raises(EngineError, match="no room"):
            await adapters.load("poet", "/poet")
        assert list(two.pair.catalogue) == []
        await trio.sleep(STEP)
        assert [worker.adapters for (worker,) in two.workers] == [{}, {}]
        assert adapters.name_of(1) is None
        # The name is free, and numbers agree.
        calls.clear()
        await adapters.load("poet", "/poet")
        assert [worker.adapters for (worker,) in two.workers] == [{2: "/poet"}] * 2
        assert adapters.name_of(2) == "poet"
        with pytest.raises(InvalidRequest, match="loaded already"):
            await adapters.load("poet", "/poet")


@pytest.mark.parametrize("what", ["embeddings", "keys and values"])
async def test_a_prompt_adapter_needs_its_like_in_both(
    what: str, tmp_path: Path, autojump_clock: object
) -> None:
    class Without(FakeWorker):
        def ready(self, **changes: Any) -> wire.Ready:
            lacking = {"embedding_width": 0} if what == "embeddings" else {"kv_shape": []}
            return super().ready(**{**lacking, **changes})

    if what == "embeddings":
        folder = str(write_prompt_adapter(tmp_path / "it", count=3, width=EMBEDDING_WIDTH))
    else:
        folder = str(write_prefix_adapter(tmp_path / "it", count=3, kv_shape=KV_SHAPE))
    for first, second, told in (
        (slow, Without, f"the worker takes no {what}"),
        (Without, slow, "aren't served with this model"),
    ):
        async with open_two(first, second) as two:
            with pytest.raises(InvalidRequest, match=told):
                await two.pair.adapters.load("it", folder)
            assert list(two.pair.catalogue) == []


async def test_an_adapter_is_unloaded_once_both_can_spare_it(autojump_clock: object) -> None:
    async with open_two() as two:
        adapters = two.pair.adapters
        await adapters.load("poet", "/poet")
        request = make_request([1, 2], priority=1, max_tokens=20)
        request.adapter = 1
        request.sequences[0].move_to(State.TOKENIZING)
        two.requests.send_nowait(request)
        await trio.sleep(3 * STEP)
        assert two.pair.statistics().running_adapters == ("poet",)
        with trio.move_on_after(5 * STEP) as scope:
            await adapters.unload("poet")
        assert scope.cancelled_caught
        assert [worker.adapters for (worker,) in two.workers] == [{}, {1: "/poet"}]
        assert list(two.pair.catalogue) == []
        await trio.sleep(20 * STEP)
        assert [worker.adapters for (worker,) in two.workers] == [{}, {}]


# ---- weights


def refuse(_: object) -> Any:
    raise ValueError("damaged")


async def test_weights_that_one_can_t_read_are_served_by_none(autojump_clock: object) -> None:
    discarded: list[int] = []
    first = {"discard_weights": lambda _: discarded.append(0)}
    second = {"read_weights": refuse}
    async with open_two(lambda: slow(calls=first), lambda: slow(calls=second)) as two:
        control = Control(two.pair, [])
        with pytest.raises(InvalidRequest, match="the weights stay as they are: damaged"):
            await control.swap_weights("/new", "wait")
        assert [worker.weights for (worker,) in two.workers] == ["", ""]
        assert discarded == [0]
        assert not two.pair.paused
        assert control.weight_version == "default"


async def test_weights_are_exchanged_in_both(autojump_clock: object) -> None:
    async with open_two() as two:
        control = Control(two.pair, [])
        sequences = [two.send(index, [1, 2], max_tokens=20) for index in (0, 1)]
        await trio.sleep(5 * STEP)
        await control.swap_weights("/new", "retract")
        assert [worker.weights for (worker,) in two.workers] == ["/new", "/new"]
        assert control.weight_version == "checksum of /new"
        await trio.sleep(60 * STEP)
        assert [len(each.output_ids) for each in sequences] == [20, 20]


async def test_a_worker_that_fails_alone_to_swap_is_replaced(autojump_clock: object) -> None:
    calls = {"swap_weights": refuse}
    async with open_two(second=lambda: slow(calls=calls)) as two:
        control = Control(two.pair, [])
        await control.swap_weights("/new", "wait")
        assert [each.weights.path for each in two.pair] == ["/new", "/new"]
        assert two.workers[0][0].weights == "/new"
        await two.pair.wait_attached()
        assert [len(each) for each in two.workers] == [1, 2]
        assert not two.pair.paused
        assert control.weight_version == "checksum of /new"


async def test_a_swap_that_fails_in_both_changes_nothing(autojump_clock: object) -> None:
    calls = {"swap_weights": refuse}
    async with open_two(lambda: slow(calls=calls), lambda: slow(calls=calls)) as two:
        control = Control(two.pair, [])
        with pytest.raises(InvalidRequest, match="the weights stay as they are: damaged"):
            await control.swap_weights("/new", "wait")
        assert [each.weights.path for each in two.pair] == ["", ""]
        assert [len(each) for each in two.workers] == [1, 1]


# ---- what can be seen


async def test_feeds_and_pins_are_of_both(autojump_clock: object) -> None:
    async with open_two() as two:
        with two.pair.iterations() as steps, two.pair.cache_events() as events:
            for index in (0, 1):
                two.send(index, [index] * 40, max_tokens=1)
            await trio.sleep(5 * STEP)
            assert sum(each.num_prefill_tokens for each in steps.take()) == 80
            assert [each.kind for each in events.take()] == ["stored"] * 4
        assert not any(each.feeds.iterations.feed.is_wanted for each in two.pair)
        pins = two.pair.pins
        pins.pin("kept", [0] * 40, 60, salt="", adapter=0)
        assert pins.names() == {"kept"}
        pins.unpin("kept")
        assert pins.names() == set()


async def test_the_prefixes_of_both_are_shown_apart(autojump_clock: object) -> None:
    async with open_two() as two:
        for index in (0, 1):
            for prompt in ([1] * 40, [2] * 40, [3] * 40):
                two.send(index, prompt, max_tokens=1)
        await trio.sleep(5 * STEP)
        cores = [each.core for each in two.pair if each.core is not None]
        caches = {3: cores[0].memory.prefix, 5: cores[1].memory.prefix}
        prefix = prefix_of_all(caches, 100)
        assert len({node.id for node in prefix.nodes}) == len(prefix.nodes) == 6
        assert {node.id // IDS_FOR_EACH for node in prefix.nodes} == {3, 5}
        assert [node.worker for node in prefix.nodes] == [3, 3, 3, 5, 5, 5]
        few = prefix_of_all(caches, 2)
        assert (few.num_left_out, few.left_out_by_worker) == (8, {3: 4, 5: 4})


async def test_each_idle_worker_is_asked(autojump_clock: object) -> None:
    def holding(pages: int) -> FakeWorker:
        return slow(calls={"statistics": lambda _: {"open_slots": 0, "pages_used": pages}})

    class Idle:
        idle = True

        def __init__(self, pair: Schedulers) -> None:
            self.statistics = pair.statistics
            self.check_integrity = pair.check_integrity
            self.metrics: Any = attrs.make_class("Counts", ["integrity_violations"])(0)

    async with open_two(lambda: holding(0), lambda: holding(7)) as two:
        engine: Any = Idle(two.pair)
        check = IdleCheck(engine, two.pair)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check.run)
            check.note()
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert engine.metrics.integrity_violations == 1


async def test_every_worker_is_called(autojump_clock: object) -> None:
    async with open_two() as two:
        assert await two.pair.call_all("ping", 5) == [5, 5]
        assert await two.pair.call("ping", 5) == 5
        assert two.pair.attached
        # One of them is enough.
        await two.pair[0].worker_power.turn_off()
        assert two.pair.attached
        await two.pair.wait_attached()
        assert await two.pair.call_all("ping", 5) == [5]
        await two.pair[1].worker_power.turn_off()
        assert not two.pair.attached
        with pytest.raises(WorkerLost, match="there is no worker to call 'ping'"):
            await two.pair.call("ping")
        with trio.move_on_after(1) as scope:
            await two.pair.wait_attached()
        assert scope.cancelled_caught
        two.pair[0].worker_power.turn_on()
        await two.pair.wait_attached()


@contextlib.asynccontextmanager
async def checking(two: Two) -> AsyncIterator[Callable[[str], Request]]:
    """Check grammars for the block; yield a function that sends a request with an expression."""
    to_stage, inbox = trio.open_memory_channel[Request](math.inf)
    submit, _passed = trio.open_memory_channel[Request](math.inf)

    def ask(expression: str) -> Request:
        request = make_request([1, 2], grammar=Grammar("regex", expression))
        to_stage.send_nowait(request)
        return request

    async with trio.open_nursery() as nursery:
        nursery.start_soon(WorkerValidation(two.pair, timeout=10.0).run, inbox, submit)
        yield ask
        nursery.cancel_scope.cancel()


async def test_a_grammar_is_checked_by_one_worker(autojump_clock: object) -> None:
    prepared: list[int] = []

    def preparing(index: int) -> FakeWorker:
        return slow(calls={"prepare": lambda _: prepared.append(index)})

    async with (
        open_two(lambda: preparing(0), lambda: preparing(1)) as two,
        checking(two) as ask,
    ):
        for expression in ("a+", "a+", "b+"):
            ask(expression)
            await trio.sleep(1)
        assert sorted(prepared) == [0, 1]
        # The answers are forgotten when a worker is replaced.
        await two.pair[1].worker_power.turn_off()
        two.pair[1].worker_power.turn_on()
        await two.pair[1].wait_attached()
        ask("a+")
        await trio.sleep(1)
        assert len(prepared) == 3


async def test_a_silent_worker_delays_only_its_own_checks(autojump_clock: object) -> None:
    prepared: list[str] = []

    def preparing(seconds: float) -> FakeWorker:
        calls = {"prepare": lambda call: prepared.append(call["grammar"][1])}
        return slow(calls=calls, call_time=seconds)

    async with (
        open_two(lambda: preparing(0.0), lambda: preparing(1000.0)) as two,
        checking(two) as ask,
    ):
        for expression in ("a+", "b+"):
            ask(expression)
        await trio.sleep(1)
        assert prepared == ["b+"]
        await two.pair[1].worker_power.turn_off()
        await trio.sleep(1)
        assert prepared == ["b+", "a+"]
