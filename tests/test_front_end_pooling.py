"""Texts of several front ends in one queue: real sockets between them, a fake worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.front_ends import open_server
from trioserve.errors import DeadlineExceeded, EngineError, Paused, QueueFull, RequestAborted
from trioserve.simulation import byte_tokenizer
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config, fake_vector

CONFIG = fake_encoder_config()


def expected(text: str) -> Any:
    found = byte_tokenizer().encode(text, add_special_tokens=False).ids
    ids = np.array(found, dtype=np.int32)
    return fake_vector(ids, np.zeros_like(ids), CONFIG.num_outputs)


class Workers:
    """Makes workers, and notes how many texts each call had."""

    def __init__(self, call_time: float = 0.05, poison: str = "", **options: Any) -> None:
        self.batches: list[int] = []
        self._options = {"call_time": call_time, **options}
        self._poison = byte_tokenizer().encode(poison).ids

    def __call__(self) -> FakeWorker:
        return fake_encoder(CONFIG, on_batch=self._note, **self._options)

    def _note(self, texts: list[list[int]]) -> None:
        self.batches.append(len(texts))
        if self._poison and any(self._poison[0] in ids for ids in texts):
            raise WorkerDies


async def test_texts_of_all_front_ends_share_calls(tmp_path: Path) -> None:
    make = Workers()
    async with open_server(tmp_path, make, encoder=CONFIG) as server:
        results: dict[str, Any] = {}

        async def ask(engine: Any, text: str) -> None:
            results[text] = (await engine.embed([text, "same"])).vectors

        async with trio.open_nursery() as nursery:
            for index in range(20):
                engine = server.front_ends[index % 2].engine
                nursery.start_soon(ask, engine, f"text {index}")
        for text, vectors in results.items():
            np.testing.assert_array_equal(vectors, [expected(text), expected("same")])
        assert len(results) == 20
        assert sum(make.batches) == 40
        assert max(make.batches) > 20  # more than one front end has
        await server.wait_nothing_held()
        metrics = await server.front_ends[0].whole.metrics()
        assert b'request_success_total{engine="0",finished_reason="stop"' in metrics


async def test_one_queue_bounds_them_and_whoever_leaves_it_is_gone(tmp_path: Path) -> None:
    make = Workers(call_time=0.5, max_num_seqs=1)
    options = {"max_num_queued_reqs": 2}
    async with open_server(tmp_path, make, encoder=CONFIG, **options) as server:
        first, second = (each.engine for each in server.front_ends)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(first.embed, "x")
                await trio.sleep(0.05)
            with trio.move_on_after(0.1):
                await first.embed(["a", "b"])
            await trio.sleep(0.05)
            with pytest.raises(DeadlineExceeded):
                await first.embed(["a", "b"], timeout=0.05)
            nursery.start_soon(first.embed, ["c", "d"])
            await trio.sleep(0.05)
            with pytest.raises(QueueFull) as full:
                await second.embed("y")
            assert full.value.retry_after >= 1
        await server.wait_nothing_held()
    assert sum(make.batches) == 4


async def test_a_pause_holds_all_of_them(tmp_path: Path) -> None:
    make = Workers()
    async with open_server(tmp_path, make, encoder=CONFIG) as server:
        first, second = server.front_ends
        await first.whole.pause("wait", refuse=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second.engine.embed, "x")
            await trio.sleep(0.2)
            assert make.batches == []
            await second.whole.resume()
        await first.whole.pause("in_place", refuse=True)
        with pytest.raises(Paused):
            await second.engine.embed("x")
        await first.whole.resume()
        await second.engine.embed("x")


async def test_abort_by_name_and_by_a_pause(tmp_path: Path) -> None:
    async with open_server(tmp_path, Workers(call_time=1.0), encoder=CONFIG) as server:
        first, second = server.front_ends

        async def ask(name: str) -> None:
            with pytest.raises(RequestAborted):
                await second.engine.embed("x", request_id=name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "mine")
            await trio.sleep(0.1)
            assert await first.whole.abort(["mine"], prefix=False) == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "another")
            await trio.sleep(0.1)
            await first.whole.pause("abort", refuse=False)


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
