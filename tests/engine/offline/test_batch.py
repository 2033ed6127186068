"""A batch for which the queue has no room at once: it waits, whatever the bound is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import trio
import trio.testing

from trioserve.engine.engine import Engine
from trioserve.engine.offline.batch import PromptBatch, complete_all
from trioserve.engine.offline.room import Room
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.text import worker_validation

Clock = trio.testing.MockClock


async def complete(
    engine: Engine,
    prompts: list[Any],
    params: list[SamplingParams] | None = None,
    room: Room | None = None,
) -> list[Completion]:
    batch = PromptBatch.of(prompts, params, {"max_tokens": 3, "seed": 1} if params is None else {})
    room = room or Room(engine.config.max_num_queued_reqs)
    return await complete_all(engine, room, batch, show_progress=False)


def slow_worker() -> FakeWorker:
    return FakeWorker(step_time=0.01, calls={"prepare": lambda _: None})


async def test_more_tokens_than_may_wait(autojump_clock: Clock) -> None:
    batch = [[1 + index % 7] * (150 if index == 3 else 40) for index in range(60)]
    options: dict[str, Any] = {"max_num_seqs": 4, "enable_prefix_caching": False}
    async with open_fake_engine(slow_worker, **options) as engine:
        calm = await complete(engine, batch)
        calm_seconds = trio.current_time()
    async with open_fake_engine(slow_worker, max_num_queued_tokens=200, **options) as engine:
        began = trio.current_time()
        completions = await complete(engine, batch)
        assert trio.current_time() - began < 2 * calm_seconds
        engine.check_integrity()
    assert [each.token_ids for each in completions] == [each.token_ids for each in calm]
    assert len(calm) == 60


async def test_more_grammars_than_may_wait(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_validation, "MAX_CHECKS", 4)
    params = [
        SamplingParams(grammar=Grammar("regex", f"a{{{index}}}"), max_tokens=3)
        for index in range(1, 21)
    ]
    async with open_fake_engine(slow_worker) as engine:
        assert len(await complete(engine, [[1]] * 20, params)) == 20


async def test_two_batches_at_once(autojump_clock: Clock) -> None:
    """Run two batches, one of which may find the queue full of the other's requests."""
    async with open_fake_engine(slow_worker, max_num_seqs=1, max_num_queued_reqs=2) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(functools.partial(complete, engine, [[1, 2, 3]] * 8))
        assert engine.statistics().scheduler.num_waiting == 0
