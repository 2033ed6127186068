"""Embeddings, scores and labels through a whole engine over a fake worker."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from trioserve import Engine, EngineConfig
from trioserve.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    Paused,
    QueueFull,
    RequestAborted,
)
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config, fake_vector
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine, run_fake_worker

CONFIG = fake_encoder_config()


class Recorder:
    """Workers that keep the batches they were called with, and die of poison."""

    def __init__(self, **options: Any) -> None:
        self.batches: list[int] = []
        self.num_workers = 0
        self._options = {"call_time": 1.0, **options}

    def __call__(self) -> FakeWorker:
        self.num_workers += 1
        return fake_encoder(CONFIG, on_batch=self._on_batch, **self._options)

    def _on_batch(self, texts: list[list[int]]) -> None:
        self.batches.append(len(texts))
        poison = byte_ids("!")[0]
        if any(poison in ids for ids in texts):
            raise WorkerDies


def byte_ids(text: str) -> list[int]:
    from trioserve.testing.fake_engine import byte_tokenizer

    return byte_tokenizer().encode(text, add_special_tokens=False).ids


def expected(text: str) -> Any:
    ids = np.array(byte_ids(text), dtype=np.int32)
    return fake_vector(ids, np.zeros_like(ids), CONFIG.num_outputs)


async def wait_idle(engine: Engine) -> None:
    with trio.fail_after(100):
        while not engine.idle:
            await trio.sleep(0.1)
    engine.check_integrity()
    assert engine.statistics().scheduler.num_waiting == 0


async def test_vectors_are_the_workers(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder() as engine:
        assert engine.task == "embed"
        found = await engine.embed(["one", "three"])
        np.testing.assert_array_equal(found.vectors, [expected("one"), expected("three")])
        assert found.usage.prompt_tokens == 8
        assert found.num_tokens == (3, 5)
        assert found.usage.completion_tokens == 0
        np.testing.assert_array_equal((await engine.embed("one")).vectors, [expected("one")])
        ids = byte_ids("one")
        np.testing.assert_array_equal((await engine.embed(ids)).vectors, [expected("one")])
        mixed = await engine.embed([ids, tuple(ids), "one"])
        np.testing.assert_array_equal(mixed.vectors, [expected("one")] * 3)
        await wait_idle(engine)


async def test_dimensions_are_cut_and_normalized(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder() as engine:
        cut = (await engine.embed("one", dimensions=4)).vectors[0]
        whole = expected("one")[:4]
        np.testing.assert_allclose(cut, whole / np.linalg.norm(whole), rtol=1e-6)
        plain = (await engine.embed("one", dimensions=4, normalize=False)).vectors[0]
        np.testing.assert_array_equal(plain, whole)
        unit = (await engine.embed("one", normalize=True)).vectors[0]
        assert np.linalg.norm(unit) == pytest.approx(1)


@pytest.mark.parametrize(
    ("inputs", "options", "param"),
    [
        ([], {}, "input"),
        ([[]], {}, "input"),
        (b"x", {}, "input"),
        ([1.5], {}, "input"),
        ([True], {}, "input"),
        ([("a", "b")], {}, "input"),
        ([[256]], {}, "input"),
        ([-1], {}, "input"),
        ("", {}, "input"),
        ("\ud800", {}, "input"),
        ("x", {"dimensions": 17}, "dimensions"),
        ("x", {"dimensions": 0}, "dimensions"),
        ("x", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("x", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("x", {"timeout": -1}, "timeout"),
        (["x"] * 9, {}, "input"),
    ],
)
async def test_what_is_refused(
    autojump_clock: trio.testing.MockClock, inputs: Any, options: Any, param: str
) -> None:
    async with open_fake_encoder(max_num_queued_reqs=8) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.embed(inputs, **options)
        assert caught.value.param == param
        await wait_idle(engine)


async def test_long_texts_are_refused_or_cut(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder() as engine:
        long = "x" * 600
        for inputs in (long, byte_ids(long)):
            with pytest.raises(ContextTooLong, match="600 tokens: the model takes 512"):
                await engine.embed(inputs)
            for truncate, kept in ((-1, 512), (5, 5), (1000, 512)):
                found = await engine.embed(inputs, truncate_prompt_tokens=truncate)
                assert found.usage.prompt_tokens == kept
                np.testing.assert_array_equal(found.vectors[0], expected("x" * kept))


async def test_a_model_does_what_it_is_for(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder() as engine:
        with pytest.raises(InvalidRequest, match="doesn't generate: it embeds texts"):
            engine.generate("x")
        with pytest.raises(InvalidRequest, match="it embeds texts"):
            await engine.classify("x")
    async with open_fake_encoder("classify") as engine:
        with pytest.raises(InvalidRequest, match="doesn't generate: it classifies texts"):
            await engine.complete("x")
        with pytest.raises(InvalidRequest, match="doesn't give embeddings: it classifies"):
            await engine.embed("x")
        with pytest.raises(InvalidRequest, match="doesn't score pairs of texts"):
            await engine.score("x", "y")
    async with open_fake_engine() as engine:
        assert engine.task == "generate"
        with pytest.raises(InvalidRequest, match="doesn't classify texts: it generates text"):
            await engine.classify("x")


async def test_scores_of_pairs(autojump_clock: trio.testing.MockClock) -> None:
    shape = fake_encoder_config("classify", labels=("relevant",))
    async with open_fake_encoder(encoder_config=shape) as engine:
        scores = await engine.score("ab", ["c", "de"])
        logits = []
        for text in ("c", "de"):
            ids = np.array(byte_ids("ab" + text), dtype=np.int32)
            types = np.zeros_like(ids)
            logits.append(fake_vector(ids, types, 1)[0])
        assert scores.values.shape == (2,)
        np.testing.assert_allclose(scores.values, 1 / (1 + np.exp(-np.array(logits))), rtol=1e-5)
        assert scores.usage.prompt_tokens == 7
        pairwise = await engine.score(["ab", "ab"], ["c", "de"])
        np.testing.assert_array_equal(pairwise.values, scores.values)
        for queries, documents in ((["a", "b"], ["c"]), ([], ["c"]), ("a", []), ("a", [1])):
            with pytest.raises(InvalidRequest):
                await engine.score(queries, documents)  # type: ignore[arg-type]


async def test_scores_of_embeddings_are_cosines(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder() as engine:
        scores = await engine.score("ab", ["c", "ab"])
        a, c = expected("ab"), expected("c")
        cosine = a @ c / np.linalg.norm(a) / np.linalg.norm(c)
        np.testing.assert_allclose(scores.values, [cosine, 1.0], atol=1e-6)
        assert scores.usage.prompt_tokens == 5  # the query is computed once


@pytest.mark.parametrize("independent", [False, True])
async def test_labels(autojump_clock: trio.testing.MockClock, independent: bool) -> None:
    import attrs

    shape = attrs.evolve(fake_encoder_config("classify"), independent_labels=independent)
    async with open_fake_encoder(encoder_config=shape) as engine:
        found = await engine.classify(["one", ("a", "b")])
        assert found.labels == ("no", "yes")
        assert found.logits.shape == found.probabilities.shape == (2, 2)
        if independent:
            wanted = 1 / (1 + np.exp(-found.logits))
        else:
            wanted = np.exp(found.logits) / np.exp(found.logits).sum(1, keepdims=True)
        np.testing.assert_allclose(found.probabilities, wanted, rtol=1e-5)
        assert found.best[0] == found.labels[int(found.logits[0].argmax())]


async def test_what_waits_goes_into_the_next_call(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder()
    async with open_fake_encoder(make_worker=make) as engine, trio.open_nursery() as nursery:
        for index in range(20):
            nursery.start_soon(engine.embed, f"text {index}")
    # One at once, one that waits at the worker, and all the others together.
    assert len(make.batches) <= 3
    assert sum(make.batches) == 20


async def test_calls_go_in_the_order_of_their_texts(autojump_clock: trio.testing.MockClock) -> None:
    called: list[list[int]] = []

    def make() -> FakeWorker:
        return fake_encoder(CONFIG, on_batch=called.extend, call_time=1.0, max_num_seqs=1)

    async with open_fake_encoder(make_worker=make) as engine:
        for _ in range(10):
            await engine.embed(["a", "b", "c"])
    assert called == [byte_ids(text) for text in "abc"] * 10


async def test_leaving_takes_out_of_the_queue(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder(max_num_seqs=1)
    async with open_fake_encoder(make_worker=make) as engine, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(engine.embed, "x")
        await trio.sleep(0.1)
        with trio.move_on_after(0.2) as scope:
            await engine.embed(["a", "b", "c"])
        assert scope.cancelled_caught
        assert engine.statistics().scheduler.num_waiting == 1
        await wait_idle(engine)
    assert sum(make.batches) == 3


@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_every_checkpoint(steps: int) -> None:
    async with open_fake_encoder() as engine:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel)
                await engine.embed(["a", "b" * 3000], truncate_prompt_tokens=-1)
                nursery.cancel_scope.cancel()
        await wait_idle(engine)
        await engine.embed("still there")


async def test_deadlines(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder(call_time=10.0)
    async with open_fake_encoder(make_worker=make, default_timeout=3.0) as engine:
        with pytest.raises(DeadlineExceeded, match="timeout of 2 s"):
            await engine.embed("x", timeout=2.0)
        with pytest.raises(DeadlineExceeded, match="--default-timeout"):
            await engine.embed("x")
        await engine.embed("x", timeout=float("inf"))
        await wait_idle(engine)


async def test_the_queue_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder(max_num_seqs=1)
    options = {"max_num_queued_reqs": 3, "max_num_queued_tokens": 100}
    async with (
        open_fake_encoder(make_worker=make, **options) as engine,
        trio.open_nursery() as nursery,
    ):
        for _ in range(2):  # two are under way, and two wait
            nursery.start_soon(engine.embed, "x")
            nursery.start_soon(engine.embed, "x")
            await trio.sleep(0.1)
        with pytest.raises(QueueFull, match="2 texts are waiting, and this request has 2") as full:
            await engine.embed(["a", "b"])
        assert full.value.retry_after >= 1
        with pytest.raises(QueueFull, match="--max-num-queued-tokens"):
            await engine.embed("x" * 99)
        nursery.start_soon(engine.embed, "c")


async def test_drain_and_close(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder()
    errors: list[Exception] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.embed("x")
        except Exception as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        async with open_fake_encoder(make_worker=make) as engine:
            nursery.start_soon(ask, engine)
            await trio.sleep(0.1)
            engine.drain()
            with pytest.raises(Draining):
                await engine.embed("x")
            await engine.wait_idle()
            assert errors == []
            engine._draining = trio.Event()
            nursery.start_soon(ask, engine)
            await trio.sleep(0.1)
    assert [type(error) for error in errors] == [EngineError]


async def test_abort_by_name(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder()
    async with open_fake_encoder(make_worker=make) as engine, trio.open_nursery() as nursery:

        async def ask(name: str) -> None:
            with pytest.raises(RequestAborted):
                await engine.embed("x", request_id=name)

        nursery.start_soon(ask, "a-1")
        nursery.start_soon(ask, "b-1")
        await trio.sleep(0.1)
        assert engine.abort("a", prefix=False) == 0
        assert engine.abort("a", prefix=True) == 1
        engine.abort_all(RequestAborted("the end"))


@pytest.mark.parametrize("mode", ["wait", "retract", "in_place"])
async def test_nothing_is_computed_in_a_pause(
    autojump_clock: trio.testing.MockClock, mode: str
) -> None:
    make = Recorder(max_num_seqs=1)
    async with open_fake_encoder(make_worker=make) as engine, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(engine.embed, "x")
        await trio.sleep(0.5)
        await engine.pause(mode)
        assert engine.paused
        done = len(make.batches)
        assert done == (4 if mode == "wait" else 2)
        nursery.start_soon(engine.embed, "later")
        await trio.sleep(100)
        assert len(make.batches) == done
        with pytest.raises(DeadlineExceeded):
            await engine.embed("x", timeout=1.0)
        engine.resume()
        await wait_idle(engine)
    assert sum(make.batches) == 5


async def test_giving_up_to_wait_lets_everybody_in_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    make = Recorder(max_num_seqs=1)
    async with open_fake_encoder(make_worker=make) as engine, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(engine.embed, "x")
        await trio.sleep(0.5)
        with trio.move_on_after(1.0):
            await engine.pause("wait")
        assert not engine.paused
        nursery.start_soon(engine.embed, "later")
        await wait_idle(engine)
    assert sum(make.batches) == 5


async def test_texts_wait_while_the_worker_is_sent_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    make = Recorder()
    async with open_fake_encoder(make_worker=make) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.embed, "x")
        await trio.sleep(0.5)
        await engine.release_memory()
        assert make.batches == [1]
        nursery.start_soon(engine.embed, "later")
        await trio.sleep(100)
        assert make.batches == [1]
        await engine.resume_memory()
        await wait_idle(engine)
    assert make.num_workers == 2
    assert sum(make.batches) == 2


async def test_a_pause_that_aborts_and_one_that_refuses(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        open_fake_encoder(make_worker=Recorder()) as engine,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            with pytest.raises(RequestAborted):
                await engine.embed("x")

        nursery.start_soon(ask)
        await trio.sleep(0.1)
        await engine.pause("abort", refuse=True)
        with pytest.raises(Paused):
            await engine.embed("x")
        engine.resume()
        await engine.embed("x")


async def test_a_dead_worker_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    killed = [trio.Event(), trio.Event(), trio.Event()]
    make = Recorder(max_num_seqs=4)
    config_holder: list[Any] = []

    def open_worker() -> Any:
        worker = make()
        return run_fake_worker(
            worker, config_holder[0], killed=killed[min(make.num_workers, 3) - 1]
        )

    config_holder.append(EngineConfig("fake"))
    async with open_fake_encoder(open_worker=open_worker) as engine:
        results: dict[int, Any] = {}

        async def ask(index: int) -> None:
            results[index] = (await engine.embed(f"text {index}")).vectors[0]

        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(ask, index)
            await trio.sleep(0.5)
            killed[0].set()
            await trio.sleep(1.5)
            killed[1].set()
        assert engine.statistics().worker_restarts == 2
        for index, found in results.items():
            np.testing.assert_array_equal(found, expected(f"text {index}"))
        assert len(results) == 12
        await wait_idle(engine)


async def test_texts_go_to_a_worker_that_is_there(autojump_clock: trio.testing.MockClock) -> None:
    """One of two workers is lost, and its next process takes long to load."""
    config, make, killed = EngineConfig("fake"), Recorder(max_num_seqs=4), trio.Event()

    @contextlib.asynccontextmanager
    async def open_worker() -> AsyncIterator[Any]:
        if make.num_workers == 2:
            await trio.sleep(1000)
        worker = make()
        ends = killed if make.num_workers == 1 else trio.Event()
        async with run_fake_worker(worker, config, killed=ends) as opened:
            yield opened

    async with open_fake_encoder(open_worker=open_worker, data_parallel_size=2) as engine:
        killed.set()
        await trio.sleep(1)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(engine.embed, f"text {index}")
        assert trio.current_time() - began < 10
        assert make.num_workers == 2


async def test_poison_fails_alone(autojump_clock: trio.testing.MockClock) -> None:
    make = Recorder(call_time=0.01)
    async with open_fake_encoder(make_worker=make) as engine:
        failed: list[int] = []

        async def ask(index: int, text: str) -> None:
            try:
                await engine.embed(["fine", text])
            except EngineError:
                failed.append(index)

        async with trio.open_nursery() as nursery:
            for index in range(30):
                nursery.start_soon(ask, index, "poison!" if index in (7, 20) else "healthy")
        assert sorted(failed) == [7, 20]
        await engine.embed("still there")
        await wait_idle(engine)


async def test_a_worker_that_always_dies_ends_the_engine(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def die(_: Any) -> None:
        raise WorkerDies

    def make() -> FakeWorker:
        return fake_encoder(CONFIG, on_batch=die)

    with pytest.raises(EngineError):
        async with open_fake_encoder(make_worker=make, max_worker_restarts=0) as engine:
            await engine.embed("x")


async def test_a_worker_that_hangs_is_replaced(autojump_clock: trio.testing.MockClock) -> None:
    workers: list[FakeWorker] = []

    def make() -> FakeWorker:
        worker = fake_encoder(CONFIG, call_time=1.0)
        workers.append(worker)
        return worker

    async with open_fake_encoder(make_worker=make, watchdog_timeout=5.0) as engine:
        await engine.embed("fine")
        workers[0].call_time = math.inf
        began = trio.current_time()
        found = await engine.embed("late")
        assert trio.current_time() - began < 20
        np.testing.assert_array_equal(found.vectors, [expected("late")])
        assert len(workers) == 2
        assert engine.metrics.worker_losses["hung"] == 1
        await wait_idle(engine)


async def test_an_answer_that_makes_no_sense(autojump_clock: trio.testing.MockClock) -> None:
    def make() -> FakeWorker:
        worker = fake_encoder(CONFIG)
        worker.calls["encode"] = lambda _: b"abc"
        return worker

    async with open_fake_encoder(make_worker=make) as engine:
        with pytest.raises(EngineError, match="makes no sense"):
            await engine.embed("x")
        await wait_idle(engine)


async def test_metrics_count(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder(make_worker=Recorder()) as engine:
        await engine.embed(["abc", "de"])
        with pytest.raises(DeadlineExceeded):
            await engine.embed("x", timeout=0.1)
        metrics = engine.metrics
        assert metrics.finished["stop"] == 2
        assert metrics.finished["error"] == 1
        assert metrics.prompt_tokens == 5
        assert metrics.e2e_latency.cumulative()[-1][1] == 2
        assert metrics.queue_time.cumulative()[-1][1] >= 1
        assert b"num_requests_running" in metrics.render()
