"""Texts of several front ends in one queue: real sockets between them, a fake worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.support.front_ends import Server, open_server
from trioserve.protocol import wire
from trioserve.protocol.errors import (
    DeadlineExceeded,
    EngineError,
    Paused,
    QueueFull,
    RequestAborted,
)
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config, fake_vector
from trioserve.testing.fake_engine import byte_tokenizer

CONFIG = fake_encoder_config()
CallTime = float | Callable[[wire.Call], float]


def expected(text: str) -> Any:
    found = byte_tokenizer().encode(text, add_special_tokens=False).ids
    ids = np.array(found, dtype=np.int32)
    return fake_vector(ids, np.zeros_like(ids), CONFIG.num_outputs)


class Workers:
    """Makes workers, and notes how many texts each call had."""

    def __init__(self, call_time: CallTime = 0.05, poison: str = "", **options: Any) -> None:
        self.made: list[FakeWorker] = []
        self.batches: list[int] = []
        self._options = {"call_time": call_time, **options}
        self._poison = byte_tokenizer().encode(poison).ids

    def __call__(self) -> FakeWorker:
        self.made.append(fake_encoder(CONFIG, on_batch=self._note, **self._options))
        return self.made[-1]

    def _note(self, texts: list[list[int]]) -> None:
        self.batches.append(len(texts))
        if self._poison and any(self._poison[0] in ids for ids in texts):
            raise WorkerDies


def first_call_long() -> CallTime:
    """Return a time of calls: the first takes longer than what a test does meanwhile."""
    seconds = itertools.chain([8.0], itertools.repeat(0.0))
    return lambda _: next(seconds)


async def counted(server: Server, *, running: int, waiting: int) -> None:
    """Wait until so many texts are under way and so many wait."""

    def found() -> tuple[int, int]:
        scheduler = server.engine_server.statistics().scheduler
        return scheduler.num_running, scheduler.num_waiting

    with trio.fail_after(20):
        while found() != (running, waiting):
            await trio.sleep(0.005)


async def test_texts_of_all_front_ends_share_calls(tmp_path: Path) -> None:
    make = Workers()
    async with open_server(tmp_path, make, encoder=CONFIG) as server:
        results: dict[str, Any] = {}
        # Until all are there.
        await server.front_ends[0].server_api.pause("wait", refuse=False)

        async def ask(engine: Any, text: str) -> None:
            results[text] = (await engine.embed([text, "same"])).vectors

        async with trio.open_nursery() as nursery:
            for index in range(20):
                engine = server.front_ends[index % 2].engine
                nursery.start_soon(ask, engine, f"text {index}")
            await counted(server, running=0, waiting=40)
            await server.front_ends[1].server_api.resume()
        for text, vectors in results.items():
            np.testing.assert_array_equal(vectors, [expected(text), expected("same")])
        assert len(results) == 20
        assert sum(make.batches) == 40
        assert max(make.batches) > 20  # more than one front end has
        await server.wait_nothing_held()
        metrics = await server.front_ends[0].server_api.metrics()
        assert b'request_success_total{engine="0",finished_reason="stop"' in metrics


async def test_one_queue_bounds_them_and_whoever_leaves_it_is_gone(tmp_path: Path) -> None:
    make = Workers(call_time=first_call_long(), max_num_seqs=1)
    options = {"max_num_queued_reqs": 2}
    async with open_server(tmp_path, make, encoder=CONFIG, **options) as server:
        first, second = (each.engine for each in server.front_ends)
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(first.embed, "x")
                await counted(server, running=number + 1, waiting=0)
            async with trio.open_nursery() as leaving:
                leaving.start_soon(first.embed, ["a", "b"])
                await counted(server, running=2, waiting=2)
                leaving.cancel_scope.cancel()
            await counted(server, running=2, waiting=0)
            with pytest.raises(DeadlineExceeded):
                await first.embed(["a", "b"], timeout=0.05)
            await counted(server, running=2, waiting=0)
            nursery.start_soon(first.embed, ["c", "d"])
            await counted(server, running=2, waiting=2)
            with pytest.raises(QueueFull) as full:
                await second.embed("y")
            assert full.value.retry_after >= 1
        await server.wait_nothing_held()
    assert sum(make.batches) == 4


async def test_a_pause_holds_all_of_them(tmp_path: Path) -> None:
    make = Workers()
    async with open_server(tmp_path, make, encoder=CONFIG) as server:
        first, second = server.front_ends
        await first.server_api.pause("wait", refuse=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second.engine.embed, "x")
            await counted(server, running=0, waiting=1)
            await trio.sleep(0.1)
            assert make.batches == []
            await second.server_api.resume()
        await first.server_api.pause("in_place", refuse=True)
        with pytest.raises(Paused):
            await second.engine.embed("x")
        await first.server_api.resume()
        await second.engine.embed("x")


async def test_abort_by_name_and_by_a_pause(tmp_path: Path) -> None:
    make = Workers(call_time=first_call_long())
    async with open_server(tmp_path, make, encoder=CONFIG) as server:
        first, second = server.front_ends

        async def ask(name: str) -> None:
            with pytest.raises(RequestAborted):
                await second.engine.embed("x", request_id=name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "mine")
            await counted(server, running=1, waiting=0)
            assert await first.server_api.abort(["mine"], prefix=False) == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "another")
            # The one before is computed to its end.
            await counted(server, running=2, waiting=0)
            await first.server_api.pause("abort", refuse=False)


async def test_poison_of_one_front_end_fails_alone(tmp_path: Path) -> None:
    make = Workers(call_time=0.01, poison="!")
    async with open_server(tmp_path, make, encoder=CONFIG) as server:
        failed: list[int] = []

        async def ask(index: int) -> None:
            engine = server.front_ends[index % 2].engine
            try:
                await engine.embed("poison!" if index == 3 else f"text {index}")
            except EngineError:
                failed.append(index)

        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(ask, index)
        assert failed == [3]
        await server.wait_nothing_held()
