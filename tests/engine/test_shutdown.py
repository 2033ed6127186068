"""The end of an engine, or of all its requests at once, over the simulation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trioserve import Engine, EngineConfig, EngineError, Grammar, RequestAborted, ShuttingDown
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker

Clock = trio.testing.MockClock


@attrs.define(eq=False)
class Reader:
    """The output of one request, and its end."""

    num_tokens: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    ended_at: float | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def read(
        self, engine: Engine, prompt: str, pause: float = 0.0, **sampling: object
    ) -> None:
        try:
            async with engine.generate(prompt, **sampling) as stream:  # type: ignore[arg-type]
                while True:
                    await trio.sleep(pause)
                    chunk = await stream.receive()
                    self.num_tokens += len(chunk.token_ids)
                    self.finish_reason = chunk.finish_reason
        except trio.EndOfChannel:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.ended_at = trio.current_time()
            self.ended.set()


async def test_abort_all_ends_a_request_in_every_stage(autojump_clock: Clock) -> None:
    readers = {name: Reader() for name in ("running", "outputs", "waiting", "done", "lagging")}
    async with (
        open_fake_engine(lambda: FakeWorker(step_time=0.1), max_num_seqs=4) as engine,
        trio.open_nursery() as nursery,
    ):
        start = nursery.start_soon
        start(lambda: readers["done"].read(engine, "d", pause=3, max_tokens=5))
        await trio.sleep(1)
        start(lambda: readers["lagging"].read(engine, "l", pause=3, max_tokens=1000))
        start(lambda: readers["running"].read(engine, "r", max_tokens=1000))
        start(lambda: readers["outputs"].read(engine, "o", n=2, max_tokens=1000))
        await trio.sleep(1)
        start(lambda: readers["waiting"].read(engine, "w", max_tokens=1000))
        await trio.sleep(0.5)
        assert engine.statistics().scheduler.num_waiting == 1
        entering = Reader()
        start(lambda: entering.read(engine, "e", max_tokens=1000))
        readers["entering"] = entering
        while engine.statistics().num_tokenizing == 0:
            await trio.lowlevel.checkpoint()
        error = ShuttingDown("time is up")
        engine.abort_all(error)
        engine.abort_all(ShuttingDown("too late to matter"))
        for name in ("running", "outputs", "waiting", "entering"):
            with trio.fail_after(0.05):
                await readers[name].ended.wait()
        for reader in readers.values():
            await reader.ended.wait()
        engine.check_integrity()
        assert engine.statistics().num_streams == 0
    assert readers["done"].finish_reason == "length"
    del readers["done"]
    assert {name: reader.error for name, reader in readers.items()} == dict.fromkeys(readers, error)
    assert readers["running"].num_tokens > 10
    # What had come before was read before the error.
    assert readers["lagging"].num_tokens > 10
    assert engine.metrics.finished["abort"] == 6


async def test_abort_all_ends_one_whose_grammar_is_prepared(autojump_clock: Clock) -> None:
    reader = Reader()
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        worker_answers = trio.Event()

        async def call(name: str, arguments: object = None, *, one: bool = False) -> object:
            await worker_answers.wait()

        engine.schedulers.call = call  # type: ignore[method-assign]
        grammar = Grammar("regex", "a+")
        nursery.start_soon(lambda: reader.read(engine, "p", grammar=grammar))
        await trio.testing.wait_all_tasks_blocked()
        assert engine.statistics().num_tokenizing == 1
        engine.abort_all(RequestAborted("by an administrator"))
        with trio.fail_after(0.1):
            await reader.ended.wait()
        assert engine.statistics().num_tokenizing == 0
    assert str(reader.error) == "by an administrator"


async def test_an_engine_that_fails_counts_its_outputs_as_errors(autojump_clock: Clock) -> None:
    readers = [Reader() for _ in range(3)]

    def die(step: int, _: object) -> None:
        if step == 5:
            raise WorkerDies

    with pytest.raises(EngineError, match="the engine failed"):
        async with (
            open_fake_engine(
                lambda: FakeWorker(step_time=0.1, script=die), max_worker_restarts=0
            ) as engine,
            trio.open_nursery() as nursery,
        ):
            for reader in readers:
                nursery.start_soon(lambda each=reader: each.read(engine, "a", max_tokens=1000))
    assert all(isinstance(reader.error, EngineError) for reader in readers)
    assert engine.metrics.finished == {"error": 3}


Leave = Callable[[trio.CancelScope], Awaitable[None]]


async def by_return(_: trio.CancelScope) -> None:
    """Check that the block ends by itself."""


async def by_cancel(scope: trio.CancelScope) -> None:
    scope.cancel()
    await trio.lowlevel.checkpoint()


async def by_error(_: trio.CancelScope) -> None:
    raise LookupError("mine")


@pytest.mark.parametrize("leave", [by_return, by_cancel, by_error])
async def test_requests_of_other_tasks_end_at_once_when_the_block_is_left(
    leave: Leave, autojump_clock: Clock
) -> None:
    readers = [Reader() for _ in range(5)]
    left_at = 0.0

    @contextlib.asynccontextmanager
    async def slow_to_end() -> AsyncIterator[Any]:
        """Run a worker that takes ten seconds to end."""
        try:
            worker = FakeWorker(step_time=0.1)
            async with run_fake_worker(worker, EngineConfig("fake")) as opened:
                yield opened
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope, contextlib.suppress(LookupError):
            async with open_fake_engine(open_worker=slow_to_end) as engine:
                for reader in readers:
                    nursery.start_soon(lambda each=reader: each.read(engine, "a", max_tokens=1000))
                await trio.sleep(1)
                left_at = trio.current_time()
                await leave(scope)
        assert trio.current_time() == left_at + 10
    for reader in readers:
        assert reader.ended_at == left_at
        assert isinstance(reader.error, EngineError)
        assert str(reader.error) == "the engine is closed"
        assert reader.num_tokens
