"""Weights that are swapped on one worker after another, while the others go on."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import trio

from tests.engine.test_workers import STEP, Workers, answers_of, open_three, prompts
from trioserve.engine.engine import Engine
from trioserve.protocol.errors import InvalidRequest
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


async def rolling(engine: Engine) -> None:
    await engine.control.swap_weights("/new", "rolling")


def refusing(workers: Workers, at: int) -> None:
    """Have the swap of that number fail, whichever worker it is."""
    numbers = itertools.count()

    def swap(worker: FakeWorker, weights: str) -> None:
        if next(numbers) == at:
            raise ValueError("damaged")
        worker.swap_weights(weights)

    for each in workers.made:
        each.calls = {"swap_weights": functools.partial(swap, each)}


async def test_outputs_are_those_without_a_swap(autojump_clock: object) -> None:
    asked = prompts(9)
    async with open_three() as (engine, _):
        expected = await answers_of(engine, asked, max_tokens=60)
    async with open_three() as (engine, workers), trio.open_nursery() as nursery:
        found: list[Any] = []

        async def ask() -> None:
            found.append(await answers_of(engine, asked, max_tokens=60))

        nursery.start_soon(ask)
        await trio.sleep(10 * STEP)
        assert all(workers.num_slots)
        await rolling(engine)
        assert [worker.weights for worker in workers.made] == ["/new"] * 3
        assert engine.weight_version == "checksum of /new"
    assert found == [expected]


async def test_the_others_compute_while_one_swaps(autojump_clock: object) -> None:
    async with open_three() as (engine, workers), trio.open_nursery() as nursery:
        seen: list[tuple[int, list[bool]]] = []

        def swap(worker: FakeWorker, weights: str) -> None:
            worker.swap_weights(weights)
            others = [each for each in workers.made if each is not worker]
            num_new = sum(each.weights == weights for each in workers.made)
            seen.append((num_new, [len(each.slots) > 0 for each in others]))

        for each in workers.made:
            each.calls = {"swap_weights": functools.partial(swap, each)}
        nursery.start_soon(functools.partial(answers_of, engine, prompts(9), max_tokens=200))
        await trio.sleep(10 * STEP)
        await rolling(engine)
        nursery.cancel_scope.cancel()
    assert seen == [(1, [True, True]), (2, [True, True]), (3, [True, True])]


async def test_if_the_first_can_t_swap_the_old_weights_serve(autojump_clock: object) -> None:
    async with open_three() as (engine, workers):
        refusing(workers, 0)
        with pytest.raises(InvalidRequest, match="the weights stay as they are: damaged"):
            await rolling(engine)
        assert [worker.weights for worker in workers.made] == [""] * 3
        assert engine.weight_version == "default"
        assert len(await answers_of(engine, prompts(6))) == 6


async def test_a_later_one_that_can_t_swap_is_replaced(autojump_clock: object) -> None:
    async with open_three() as (engine, workers):
        refusing(workers, 1)
        await rolling(engine)
        assert [each.weights.path for each in engine.schedulers] == ["/new"] * 3
        await trio.sleep(100 * STEP)
        assert len(workers.made) == 4
        assert engine.weight_version == "checksum of /new"
        assert len(await answers_of(engine, prompts(6))) == 6


async def test_one_worker_is_too_few(autojump_clock: object) -> None:
    async with open_fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="mode rolling needs several workers") as caught:
            await engine.update_weights("fake", mode="rolling")
        assert caught.value.param == "mode"
