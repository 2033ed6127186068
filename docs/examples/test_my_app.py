"""Testing a program of your own without a model: ``python -m pytest docs/examples/test_my_app.py``.

Only the worker is fake; the rest is the real engine. Time is virtual: an hour passes at once.
"""

import trio
import trio.testing

import trioserve
from trioserve.protocol import wire
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.virtual import run_virtual


async def summarize(engine: trioserve.Engine, text: str) -> str:
    """Return a summary, or give up after a minute: the function under test."""
    with trio.move_on_after(60):
        return (await engine.complete(text, max_tokens=30, seed=1)).text
    return "no time"


def test_a_summary() -> None:
    async def main() -> None:
        async with open_fake_engine() as engine:
            assert len(await summarize(engine, "a long text")) > 10

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_worker_that_is_too_slow() -> None:
    async def main() -> None:
        async with open_fake_engine(lambda: FakeWorker(step_time=10)) as engine:
            assert await summarize(engine, "a long text") == "no time"
            assert engine.statistics().scheduler.num_running == 0  # the request was aborted

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def dies_in_its_third_step(step: int, plan: wire.Plan) -> None:
    if step == 2:
        raise WorkerDies


async def summarize_with_a_dying_worker() -> str:
    workers = iter([FakeWorker(step_time=0.01, script=dies_in_its_third_step)])
    async with open_fake_engine(lambda: next(workers, FakeWorker(step_time=0.01))) as engine:
        return await summarize(engine, "a long text")


def test_a_dead_worker_changes_nothing_whatever_the_order_of_tasks() -> None:
    assert len({run_virtual(summarize_with_a_dying_worker, seed=seed) for seed in range(20)}) == 1
