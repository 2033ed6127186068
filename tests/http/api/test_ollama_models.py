"""Ollama's routes about models, and embeddings."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import trioserve
from tests.support.chats import THINKS
from tests.support.http_stub import (
    StubEngine,
    StubTokenizer,
    client_of,
    post,
)
from trioserve.testing.fake_engine import open_fake_encoder


@attrs.define(eq=False)
class ModelEngine(StubEngine):
    """One that says what its model is."""

    ready: Any = attrs.field(
        factory=lambda: SimpleNamespace(model_checksum="abc", dtype="bfloat16")
    )
    task: str = "generate"


class TestModels:
    async def get(self, path: str, **options: Any) -> Any:
        response = await client_of(ModelEngine(), **options).get(path)
        assert response.status_code == 200
        return await response.get_json()

    async def test_tags(self) -> None:
        reply = await self.get("/api/tags", served_model_name=("one", "two"))
        assert [model["name"] for model in reply["models"]] == ["one", "two"]
        first = reply["models"][0]
        assert (first["model"], first["digest"]) == ("one", "abc")
        assert first["details"]["quantization_level"] == "bfloat16"

    async def test_ps(self) -> None:
        (model,) = (await self.get("/api/ps"))["models"]
        assert (model["name"], model["context_length"]) == ("stub", 2048)

    async def test_version(self) -> None:
        assert await self.get("/api/version") == {"version": trioserve.__version__}

    async def test_show(self) -> None:
        stub = ModelEngine(tokenizer=StubTokenizer(THINKS), generation_defaults={"top_k": 3})
        for body in ({"model": "stub"}, {"name": "stub:latest", "verbose": True}, {}):
            reply = await post(stub, "/api/show", **body)
            assert reply["template"] == THINKS
            assert reply["parameters"] == "top_k 3"
            assert reply["capabilities"] == ["completion", "tools", "thinking"]
            info = reply["model_info"]
            assert info[f"{info['general.architecture']}.context_length"] == 2048
        reply = await post(attrs.evolve(stub, reads_images=True), "/api/show")
        assert reply["capabilities"] == ["completion", "vision", "tools", "thinking"]
        reply = await post(ModelEngine(task="embed"), "/api/show")
        assert reply["capabilities"] == ["embedding"]
        response = await client_of(stub).post("/api/show", json={"model": "other"})
        assert response.status_code == 404


async def test_embeddings() -> None:
    async with open_fake_encoder() as encoder:
        stub: Any = encoder
        whole = await post(stub, "/api/embed", input=["a cat", "a dog"], keep_alive="5m")
        one = await post(stub, "/api/embed", input="a cat", options={"num_ctx": 512})
        assert len(whole["embeddings"]) == 2
        assert whole["embeddings"][0] == pytest.approx(one["embeddings"][0], abs=1e-5)
        assert math.hypot(*one["embeddings"][0]) == pytest.approx(1, abs=1e-5)
        assert one["prompt_eval_count"] > 0
        assert one["total_duration"] > 0
        long = "cat " * 5000
        assert (await post(stub, "/api/embed", input=long))["embeddings"]
        response = await client_of(stub).post("/api/embed", json={"input": long, "truncate": False})
        assert response.status_code == 400
        assert "input" in (await response.get_json())["error"]
        old = await post(stub, "/api/embeddings", prompt="a cat", keep_alive="5m")
        assert set(old) == {"embedding"}
        length = math.hypot(*old["embedding"])
        unit = [number / length for number in old["embedding"]]
        assert unit == pytest.approx(one["embeddings"][0], abs=1e-5)
        response = await client_of(stub).post("/api/embeddings", json={"prompt": 5})
        assert response.status_code == 400
        assert "prompt" in json.loads(await response.get_data(True))["error"]
