"""Embeddings by models that generate: through the scheduler, and as transformers' hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
import trio
import trio.testing

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.front_ends import open_server
from tests.support.http_stub import server_config
from tests.support.lora_adapters import make_adapter, merge
from tests.support.tiny_models import make_tiny
from trioserve import AdapterNotFound, Engine
from trioserve.http import create_app
from trioserve.protocol import wire
from trioserve.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    RequestAborted,
)
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine

TOLERANCE = 1e-4
TEXTS = [
    "hello there world",
    "the cat and the dog on the house " * 6,
    "x",
    "the cat and the dog on the house " * 6 + "is in the world",
]


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def fake_vectors(texts: list[str], pooling: str) -> Any:
    """Return a fake worker's vectors of texts, before they are normalized."""
    values = [np.mean(ids_of(text)) if pooling == "mean" else ids_of(text)[-1] for text in texts]
    return np.array([[value, 1.0] for value in values], dtype=np.float32)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_prompts_are_pooled_beside_generations(
    autojump_clock: trio.testing.MockClock, pooling: str
) -> None:
    def make() -> FakeWorker:
        return FakeWorker(max_num_batched_tokens=24, step_time=0.01)

    async with open_fake_engine(make) as engine:
        # Their prefixes are cached, and the second text begins as the last one does.
        await engine.complete(TEXTS[3], max_tokens=3)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(_complete, engine)
            found = await engine.embed(TEXTS, pooling=pooling, normalize=False)
        np.testing.assert_allclose(found.vectors, fake_vectors(TEXTS, pooling), rtol=1e-6)
        assert found.usage.prompt_tokens == sum(map(len, TEXTS))
        assert found.num_tokens == tuple(map(len, TEXTS))
        unit = await engine.embed(ids_of("x"), pooling=pooling)
        assert np.linalg.norm(unit.vectors[0]) == pytest.approx(1)
        cut = await engine.embed("x", dimensions=1)
        assert cut.vectors.tolist() == [[1.0]]
        await wait_idle(engine)


async def wait_idle(engine: Engine) -> None:
    with trio.fail_after(100):
        while not engine.idle:
            await trio.sleep(0.1)
    engine.check_integrity()
    assert engine.statistics().scheduler.pages_held == 0


async def _complete(engine: Engine) -> None:
    await engine.complete("something else", max_tokens=40)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_prompts_that_are_preempted(
    autojump_clock: trio.testing.MockClock, pooling: str
) -> None:
    def make() -> FakeWorker:
        return FakeWorker(num_pages=24, page_size=4, max_num_batched_tokens=8, step_time=0.01)

    async with open_fake_engine(make, max_model_len=90) as engine:
        texts = [f"{index} " * 12 for index in range(8)]
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(_complete, engine)
            found = await engine.embed(texts, pooling=pooling, normalize=False)
        np.testing.assert_allclose(found.vectors, fake_vectors(texts, pooling), rtol=1e-6)
        await wait_idle(engine)


async def test_what_is_refused_and_what_ends(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0), max_model_len=64) as engine:
        with pytest.raises(InvalidRequest, match="pooling must be one of last, mean") as refused:
            await engine.embed("x", pooling="cls")
        assert refused.value.param == "pooling"
        with pytest.raises(ContextTooLong) as long:
            await engine.embed(["x", "y" * 100])
        assert long.value.param == "input"
        found = await engine.embed("y" * 100, truncate_prompt_tokens=5, normalize=False)
        assert found.usage.prompt_tokens == 5
        with pytest.raises(DeadlineExceeded):
            await engine.embed("z", timeout=0.5)
        with pytest.raises(InvalidRequest, match="dimensions must be from 1 to 2"):
            await engine.embed("x", dimensions=3)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(RequestAborted):
                    await engine.embed(["a", "b"], request_id="mine")

            nursery.start_soon(ask)
            await trio.sleep(0.5)
            assert engine.abort("mine", prefix=True) == 2
        await wait_idle(engine)


async def test_a_worker_without_the_vector_is_not_trusted() -> None:
    class Forgetful(FakeWorker):
        def step(self, plan: wire.Plan) -> wire.StepResult | wire.Failure:
            return attrs.evolve(super().step(plan), pooled=[])

    with pytest.raises(EngineError, match="lacks the vector"):
        async with open_fake_engine(Forgetful, max_worker_restarts=0) as engine:
            await engine.embed("x")


async def test_through_front_ends(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        for front_end in server.front_ends:
            found = await front_end.engine.embed(TEXTS, pooling="mean", normalize=False)
            np.testing.assert_allclose(found.vectors, fake_vectors(TEXTS, "mean"), rtol=1e-6)
        await server.wait_nothing_held()


async def test_over_http() -> None:
    async with open_fake_engine() as engine:
        client: Any = create_app(engine, server_config()).test_client()
        body = {"input": TEXTS, "pooling": "mean", "normalize": False}
        response = await client.post("/v1/embeddings", json=body)
        reply = await response.get_json()
        assert response.status_code == 200, reply
        found = [each["embedding"] for each in reply["data"]]
        np.testing.assert_allclose(found, fake_vectors(TEXTS, "mean"), rtol=1e-6)
        response = await client.post("/v1/embeddings", json={"input": "x", "pooling": "cls"})
        assert response.status_code == 400
        assert (await response.get_json())["error"]["param"] == "pooling"


# ---- real models


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def hidden_states(folder: Path, text: str) -> Any:
    """[T, E]: behind the last norm, as transformers computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        given = tokenizer(text, return_tensors="pt")
        return model(input_ids=given["input_ids"]).last_hidden_state[0].numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_vectors_are_transformers_hidden_states(folder: Path, pooling: str) -> None:
    states = [hidden_states(folder, text) for text in TEXTS]
    wanted = np.stack([each.mean(0) if pooling == "mean" else each[-1] for each in states])
    async with open_tiny_engine(folder, max_num_batched_tokens=16) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_complete, engine)
            # Twice: then prefixes are cached.
            for _ in range(2):
                found = await engine.embed(TEXTS, pooling=pooling, normalize=False)
                np.testing.assert_allclose(found.vectors, wanted, rtol=0, atol=TOLERANCE)
        unit = await engine.embed(TEXTS, pooling=pooling)
        lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(unit.vectors, wanted / lengths, rtol=0, atol=TOLERANCE)
        await assert_idle(engine)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_an_adapters_vectors_are_the_merged_models(tmp_path: Path, pooling: str) -> None:
    model = make_tiny("qwen3", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", seed=1, rank=4)
    merged = merge(model, adapter, tmp_path / "merged")
    options: dict[str, Any] = {"max_num_batched_tokens": 16}
    async with open_tiny_engine(model, lora_modules=[f"mine={adapter}"], **options) as engine:
        with pytest.raises(AdapterNotFound):
            await engine.embed("x", adapter="another")
        own, plain = {}, {}
        async with trio.open_nursery() as nursery:

            async def ask(found: dict[str, Any], name: str) -> None:
                found["vectors"] = (
                    await engine.embed(TEXTS, pooling=pooling, adapter=name, normalize=False)
                ).vectors

            nursery.start_soon(ask, own, "mine")
            nursery.start_soon(ask, plain, "")
    for found, folder in ((own, merged), (plain, model)):
        async with open_tiny_engine(folder, **options) as engine:
            wanted = await engine.embed(TEXTS, pooling=pooling, normalize=False)
        np.testing.assert_allclose(found["vectors"], wanted.vectors, rtol=0, atol=TOLERANCE)
    assert np.abs(own["vectors"] - plain["vectors"]).max() > 0.01


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_bfloat16_points_the_same_way(folder: Path, pooling: str) -> None:
    """By the compiled kernels, where the processor has what they need."""
    states = [hidden_states(folder, text) for text in TEXTS]
    wanted = np.stack([each.mean(0) if pooling == "mean" else each[-1] for each in states])
    async with open_tiny_engine(folder, dtype="bfloat16", max_num_batched_tokens=16) as engine:
        found = (await engine.embed(TEXTS, pooling=pooling)).vectors
    cosines = (found * wanted).sum(1) / np.linalg.norm(wanted, axis=1)
    assert cosines.min() > 0.995
