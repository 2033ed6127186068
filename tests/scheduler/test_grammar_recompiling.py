"""Grammars that a worker may lack are compiled beside the steps, before their sequences run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from trioserve.config import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
from trioserve.protocol.grammar import Grammar
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock
SLOW, OTHER = Grammar("regex", "slow"), Grammar("regex", "other")
COMPILING = 30.0


def text_of(call: wire.Call) -> str:
    """Return the grammar that a call is about."""
    return str(msgspec.msgpack.decode(call.arguments)["grammar"][1])


def workers(*, dies_in_step: int = 5, refuses: bool = False) -> Callable[[], FakeWorker]:
    """Make workers: the first dies, the next take long to compile and refuse if they are to."""
    made: list[FakeWorker] = []

    def make() -> FakeWorker:
        first, compiled = not made, set[str]()

        def prepare(arguments: Any) -> Any:
            if refuses and not first:
                return {"error": "it has become too much", "param": "grammar"}
            compiled.add(arguments["grammar"][1])
            assert arguments.get("tried", False) is not first
            return 1000

        def check(step: int, plan: wire.Plan) -> None:
            if first and step == dies_in_step:
                raise WorkerDies
            for slot in made[-1].slots.values():
                grammar = slot.sampler.grammar
                assert grammar is None or grammar.text in compiled

        worker = FakeWorker(
            step_time=0.1,
            script=check,
            calls={"prepare": prepare},
            call_time=lambda call: 0.0 if first or text_of(call) in compiled else COMPILING,
        )
        made.append(worker)
        return worker

    return make


async def test_requests_without_a_grammar_go_on_meanwhile(autojump_clock: Clock) -> None:
    ends: dict[str, float] = {}

    async with open_fake_engine(workers()) as engine:

        async def complete(name: str, grammar: Grammar | None = None, n: int = 1) -> None:
            completion = await engine.complete([1, 2], max_tokens=20, grammar=grammar, n=n)
            assert completion.usage.completion_tokens == 20 * n
            ends[name] = trio.current_time()

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete, "slow", SLOW)
            nursery.start_soon(complete, "several", SLOW, 3)
            nursery.start_soon(complete, "other", OTHER)
            nursery.start_soon(complete, "plain")
            await trio.sleep(1.5)
            assert engine.healthy
            nursery.start_soon(complete, "late")
        assert engine.statistics().worker_restarts == 1
        assert ends["plain"] - began < 10 > ends["late"] - began
        assert COMPILING <= ends["slow"] - began < COMPILING + 10
        assert ends["other"] - began < COMPILING + 10  # two at a time
        engine.check_integrity()


async def test_a_grammar_that_is_refused_now_ends_its_requests(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(refuses=True)) as engine:
        with pytest.raises(EngineError, match="compiled again: it has become too much"):
            await engine.complete([1, 2], max_tokens=20, grammar=SLOW, n=2)
        assert (await engine.complete([1], max_tokens=3)).usage.completion_tokens == 3
        engine.check_integrity()


async def test_a_request_that_leaves_meanwhile_leaves_nothing(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers()) as engine:
        with trio.move_on_after(10) as scope:
            await engine.complete([1, 2], max_tokens=20, grammar=SLOW)
        assert scope.cancelled_caught
        assert (await engine.complete([1], max_tokens=3)).usage.completion_tokens == 3
        await trio.sleep(2 * COMPILING)
        engine.check_integrity()


async def test_the_next_process_loads_what_grammars_need(autojump_clock: Clock) -> None:
    start = start_message(EngineConfig("m"), Path("/m"))
    async with open_fake_engine(FakeWorker, data_parallel_size=2) as engine:
        await engine.complete([1, 2], max_tokens=2)
        assert not any(each.amend(start).has_grammars for each in engine.worker_group)
        await engine.complete([1, 2], max_tokens=2, grammar=SLOW)
        await engine.add_worker()
        assert all(each.amend(start).has_grammars for each in engine.worker_group)
        assert len(list(engine.worker_group)) == 3


class Forgetful(FakeWorker):
    """A worker that has dropped a grammar once a sequence that follows it has left its slot."""

    compiled: set[str]
    num_compiled: int

    def step(self, plan: wire.Plan) -> wire.StepResult | wire.Failure:
        if wire.ints(plan.closed).size:
            self.compiled.clear()
        return super().step(plan)


def forgetful(num_pages: int = 12, *, refuses: bool = False) -> Forgetful:
    """Return a worker with room for some sequences' beginnings, which is slow to compile again.

    If it ``refuses``, it finds the grammar too heavy then.
    """

    def prepare(arguments: Any) -> Any:
        if refuses and worker.num_compiled:
            return {"error": "it has become too much", "param": "grammar"}
        worker.compiled.add(arguments["grammar"][1])
        worker.num_compiled += 1
        return 1000

    def check(step: int, plan: wire.Plan) -> None:
        for opened in plan.opened:
            grammar = opened.sampler.grammar
            assert grammar is None or grammar.text in worker.compiled

    worker = Forgetful(
        step_time=0.1,
        num_pages=num_pages,
        page_size=4,
        script=check,
        calls={"prepare": prepare},
        call_time=lambda _: COMPILING if worker.num_compiled and not refuses else 0.0,
    )
    worker.compiled, worker.num_compiled = set(), 0
    return worker


async def test_a_grammar_is_compiled_again_beside_the_steps_after_a_preemption(
    autojump_clock: Clock,
) -> None:
    ends: dict[str, float] = {}
    workers: list[Forgetful] = []

    def make() -> Forgetful:
        workers.append(forgetful())
        return workers[-1]

    async with open_fake_engine(make) as engine:

        async def complete(name: str, grammar: Grammar | None = None) -> None:
            completion = await engine.complete([1, 2], max_tokens=30, grammar=grammar)
            assert completion.usage.completion_tokens == 30
            ends[name] = trio.current_time()

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete, "plain")
            await trio.sleep(0.05)
            nursery.start_soon(complete, "slow", SLOW)
            await trio.sleep(5)
            assert engine.statistics().scheduler.num_preemptions
            nursery.start_soon(complete, "late")
        assert engine.statistics().worker_restarts == 0
        assert workers[0].num_compiled == 2
        assert ends["plain"] - began < 10 > ends["late"] - began
        assert COMPILING <= ends["slow"] - began < COMPILING + 10
        engine.check_integrity()


async def test_a_running_request_keeps_a_grammar_that_another_can_t_have_again(
    autojump_clock: Clock,
) -> None:
    outcomes: dict[int, str] = {}

    async with open_fake_engine(lambda: forgetful(14, refuses=True)) as engine:

        async def complete(number: int, max_tokens: int) -> None:
            try:
                await engine.complete([number, 2], max_tokens=max_tokens, grammar=SLOW)
            except EngineError as error:
                outcomes[number] = str(error)
            else:
                outcomes[number] = "whole"

        # The last loses its slot, and has room again when the second ends: the first still runs.
        async with trio.open_nursery() as nursery:
            for number, max_tokens in enumerate((30, 20, 30)):
                nursery.start_soon(complete, number, max_tokens)
                await trio.sleep(0.05)
        assert outcomes.pop(2).endswith("compiled again: it has become too much")
        assert outcomes == {0: "whole", 1: "whole"}
        engine.check_integrity()
