"""An abort in every stage frees everything: the pages, the worker's slot, the tasks.

Each test leaves the request's scope in one stage of its life, over a real worker process, and then
looks at the engine, at the worker and at trio's own count of tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_compiled_engine
from tests.support.tiny_models import make_tiny
from trioserve import Engine, InvalidRequest, RequestAborted
from trioserve.requests.request import Finish, FinishReason, State


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama2", tmp_path_factory.mktemp("llama2"), max_position_embeddings=4096, head_dim=32
    )


@asynccontextmanager
async def engine_that_ends_clean(tiny: Path, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine; after the block it must be idle, with no more tasks than before."""
    async with open_compiled_engine(tiny, **options) as engine:
        await assert_idle(engine)
        tasks = trio.lowlevel.current_statistics().tasks_living
        yield engine
        await assert_idle(engine)
        # A thread that was abandoned in the middle of a long text still ends, and says so to trio.
        with trio.fail_after(30):
            while trio.lowlevel.current_statistics().tasks_living != tasks:
                await trio.sleep(0.01)


async def leave_when(
    engine: Engine, prompt: Any, reached: Callable[[State], bool], **sampling: Any
) -> None:
    """Enter a request and cancel its scope as soon as ``reached`` is true of its state."""
    async with trio.open_nursery() as nursery:
        before = set(engine._open)

        async def run() -> None:
            async with engine.generate(prompt, ignore_eos=True, **sampling) as stream:
                async for _ in stream:
                    pass

        nursery.start_soon(run)
        with trio.fail_after(60):
            while True:
                new = set(engine._open) - before
                if new and reached(next(iter(new)).sequences[0].state):
                    break
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_while_tokenizing(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        text = "the cat and the dog " * 8_000
        await leave_when(engine, text, lambda state: state is State.TOKENIZING)


async def test_while_waiting(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny, max_num_seqs=1) as engine:
        async with engine.generate([3, 4, 5], max_tokens=2000, ignore_eos=True) as running:
            await running.receive()
            await leave_when(engine, [6, 7], lambda state: state is State.WAITING, max_tokens=2000)
            assert engine.statistics().scheduler.num_waiting == 0
            # The neighbor that runs is none the wiser.
            await running.receive()


async def test_during_prefill(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny, max_num_batched_tokens=16) as engine:
        prompt = [3 + number % 250 for number in range(3000)]
        await leave_when(engine, prompt, lambda state: state is State.PREFILL)


@pytest.mark.parametrize("depth", [1, 2])
async def test_several_outputs_in_every_stage(tiny: Path, depth: int) -> None:
    """Abort outputs while the first computes the prompt and the others wait for its pages."""
    options = {"max_num_batched_tokens": 16, "max_plans_in_flight": depth, "max_num_seqs": 3}
    async with engine_that_ends_clean(tiny, **options) as engine:
        prompt = [3 + number % 250 for number in range(200)]
        states = list(State)
        for stage in (State.TOKENIZING, State.WAITING, State.PREFILL, State.DECODE):
            # A stage that has ended before it is looked at is left in the next one.
            at_least = states[states.index(stage) :]
            await leave_when(
                engine,
                prompt,
                at_least.__contains__,
                n=5,
                max_tokens=2000,
                prompt_logprobs=1,
                cache_salt=stage.value,
            )
            await assert_idle(engine)
        async with engine.generate(prompt, n=5, max_tokens=2000, ignore_eos=True) as stream:
            while (await stream.receive()).index != 2:
                pass


async def test_during_decode(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        await leave_when(engine, [3, 4], lambda state: state is State.DECODE, max_tokens=2000)


@pytest.mark.parametrize("depth", [1, 2])
async def test_leaving_after_some_chunks(tiny: Path, depth: int) -> None:
    async with engine_that_ends_clean(tiny, max_plans_in_flight=depth) as engine:
        for chunks in (1, 2, 5):
            async with engine.generate([3, 4], max_tokens=2000, ignore_eos=True) as stream:
                for _ in range(chunks):
                    await stream.receive()


async def test_an_exception_in_the_block_aborts_and_comes_out_as_it_is(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        with pytest.raises(KeyError, match="mine"):
            async with engine.generate([3, 4], max_tokens=2000, ignore_eos=True) as stream:
                await stream.receive()
                raise KeyError("mine")


async def test_nothing_is_computed_for_a_request_past_the_plans_in_flight(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        async with engine.generate([3, 4], max_tokens=4000, ignore_eos=True) as stream:
            await stream.receive()
        await assert_idle(engine)
        steps = (await engine.call_worker("statistics"))["steps"]
        await trio.sleep(0.05)
        assert (await engine.call_worker("statistics"))["steps"] == steps


async def test_many_leave_at_once_and_their_neighbors_go_on(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        prompt = [3, 4, 5]
        alone = await engine.complete(prompt, max_tokens=60, temperature=0, ignore_eos=True)
        neighbor: list[int] = []

        async def stay() -> None:
            completion = await engine.complete(
                prompt, max_tokens=60, temperature=0, ignore_eos=True
            )
            neighbor.extend(completion.token_ids)

        async def leave(after: int) -> None:
            async with engine.generate([7, after], max_tokens=500, ignore_eos=True) as stream:
                for _ in range(after):
                    await stream.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stay)
            for after in range(12):
                nursery.start_soon(leave, after)
        assert neighbor == list(alone.token_ids)


async def test_an_abort_from_outside_ends_the_stream_with_its_error(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        with pytest.raises(RequestAborted, match="by an administrator"):
            async with engine.generate([3, 4], max_tokens=2000, ignore_eos=True) as stream:
                await stream.receive()
                (request,) = engine._open
                error = RequestAborted("aborted by an administrator")
                engine.schedulers.abort(
                    request.sequences[0], Finish(FinishReason.ABORT, None, error)
                )
                engine.schedulers.abort(
                    request.sequences[0], Finish(FinishReason.ABORT, None, error)
                )
                async for _ in stream:
                    pass


async def test_a_refused_request_leaves_nothing(tiny: Path) -> None:
    async with engine_that_ends_clean(tiny) as engine:
        with pytest.raises(InvalidRequest):
            async with engine.generate([3] * 5000):
                raise AssertionError("a prompt longer than the model was admitted")
