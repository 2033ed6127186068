"""Adapters over HTTP: named by requests, listed, loaded and unloaded by admins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from quart_trio.testing import TrioClient

from tests.support.prompt_adapters import write_prompt_adapter
from trioserve import Engine, EngineConfig, ServerConfig
from trioserve.http import create_app
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_model import EMBEDDING_WIDTH

ADMIN = {"Authorization": "Bearer the-admin-key"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TEXT: dict[str, Any] = {"prompt": "hello", "max_tokens": 8}


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Engine, TrioClient]]:
    config = ServerConfig(
        engine=EngineConfig("fake"),
        admin_api_key=["the-admin-key"],
        served_model_name=["base", "also-base"],
    )
    options = {"lora_modules": ["pirate=/adapters/pirate", "poet=/adapters/poet"], **options}
    async with open_fake_engine(lambda: FakeWorker(step_time=0.001), **options) as engine:
        yield engine, create_app(engine, config).test_client()


async def post(client: TrioClient, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    response = await client.post(path, json=body, headers=headers)
    return response.status_code, json.loads(await response.get_data(True))


async def get(client: TrioClient, path: str) -> Any:
    response = await client.get(path, headers=ADMIN)
    return json.loads(await response.get_data(True))


async def test_models_are_listed_with_their_parents() -> None:
    async with serving() as (_, client):
        cards = (await get(client, "/v1/models"))["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("base", None),
            ("also-base", None),
            ("pirate", "base"),
            ("poet", "base"),
        ]
        roots = [card["root"] for card in cards]
        assert roots == ["fake", "fake", "/adapters/pirate", "/adapters/poet"]
        assert (await get(client, "/v1/models/poet"))["root"] == "/adapters/poet"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
async def test_the_model_s_name_chooses(path: str, body: dict[str, Any]) -> None:
    async with serving() as (_, client):

        async def text(**fields: Any) -> str:
            status, answer = await post(client, path, {**body, "seed": 1, **fields})
            assert status == 200, answer
            assert answer["model"] == fields.get("model", "base")
            choice = answer["choices"][0]
            words: str = choice["message"]["content"] if "message" in choice else choice["text"]
            return words

        plain, pirate, poet = [await text(model=name) for name in ("base", "pirate", "poet")]
        assert len({plain, pirate, poet}) == 3
        assert await text() == await text(model="also-base") == plain
        assert await text(lora_path="poet") == await text(model="base", lora_path="poet") == poet
        assert await text(model="poet", lora_path="poet") == poet
        assert await text(lora_path="") == await text(lora_path=None) == plain


async def test_refusals_name_the_field() -> None:
    async with serving() as (_, client):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for stream in (False, True):
                fields = {**body, "stream": stream}
                status, answer = await post(client, path, {**fields, "model": "nobody"})
                error = answer["error"]
                assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
                assert "base, also-base, pirate, poet" in error["message"]
                status, answer = await post(client, path, {**fields, "lora_path": "nobody"})
                error = answer["error"]
                assert (status, error["code"]) == (404, "model_not_found")
                assert error["param"] == "lora_path"
                assert "'nobody'" in error["message"]
            both = {**body, "model": "poet", "lora_path": "pirate"}
            status, answer = await post(client, path, both)
            assert (status, answer["error"]["param"]) == (400, "lora_path")


async def test_generate_takes_one_or_one_for_each_prompt() -> None:
    async with serving() as (_, client):

        async def texts(**fields: Any) -> list[str]:
            sampling = {"max_new_tokens": 8, "sampling_seed": 1}
            status, answer = await post(
                client, "/generate", {"sampling_params": sampling, **fields}
            )
            assert status == 200, answer
            return [each["text"] for each in (answer if isinstance(answer, list) else [answer])]

        (plain,), (poet,) = await texts(text="a"), await texts(text="a", lora_path="poet")
        assert plain != poet
        assert await texts(text=["a", "a"], lora_path="poet") == [poet, poet]
        assert await texts(text=["a"] * 3, lora_path=["poet", None, ""]) == [poet, plain, plain]
        status, answer = await post(client, "/generate", {"text": "a", "lora_path": "nobody"})
        assert (status, answer["error"]["param"]) == (404, "lora_path")
        body = {"text": ["a", "b"], "lora_path": ["poet"]}
        status, answer = await post(client, "/generate", body)
        assert (status, answer["error"]["param"]) == (400, "lora_path")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_load_and_unload(prefix: str) -> None:
    async with serving(lora_modules=[], enable_lora=True) as (engine, client):

        async def control(verb: str, **body: Any) -> tuple[int, Any]:
            return await post(client, f"{prefix}/{verb}_lora_adapter", body, **ADMIN)

        status, answer = await control("load", lora_name="a", lora_path="/adapters/a")
        assert (status, answer) == (200, {"success": True, "loaded_adapters": {"a": "/adapters/a"}})
        status, answer = await control("load", lora_name="a", lora_path="/adapters/b")
        assert (status, answer["error"]["param"]) == (400, "lora_name")
        for name in ("base", "also-base", "fake", ""):
            status, answer = await control("load", lora_name=name, lora_path="/adapters/b")
            assert (status, answer["error"]["param"]) == (400, "lora_name")
        status, answer = await control("load", lora_name="b", lora_path="/adapters/bad")
        assert (status, answer["error"]["param"]) == (400, "lora_path")
        assert answer["error"]["message"].startswith("lora_path: /adapters/bad is bad")
        status, answer = await control("load", lora_name="b", lora_path="/adapters/missing")
        assert (status, answer["error"]["param"]) == (404, "lora_path")
        status, answer = await control("load", lora_name="b", lora_path="/a", load_inplace=True)
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        status, answer = await control("unload", lora_name="b")
        assert (status, answer["error"]["param"]) == (404, "lora_name")

        async with trio.open_nursery() as nursery:
            results: list[tuple[int, Any]] = []

            async def ask() -> None:
                body = {**TEXT, "model": "a", "max_tokens": 300}
                results.append(await post(client, "/v1/completions", body))

            nursery.start_soon(ask)
            while engine.statistics().scheduler.num_running == 0:
                await trio.sleep(0.001)
            status, answer = await control("unload", lora_name="a")
            assert (status, answer["loaded_adapters"]) == (200, {})
        ((status, answer),) = results
        assert (status, answer["usage"]["completion_tokens"]) == (200, 300)
        status, answer = await post(client, "/v1/completions", {**TEXT, "model": "a"})
        assert (status, answer["error"]["param"]) == (404, "model")


async def test_admins_only() -> None:
    async with serving() as (engine, client):
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            status, _ = await post(client, path, {"lora_name": "x", "lora_path": "/x"})
            assert status == 401
        for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            status, _ = await post(client, path, {"lora_name": "poet"})
            assert status == 401
        assert len(engine.adapters) == 2


async def test_a_server_that_serves_none() -> None:
    async with serving(lora_modules=[]) as (_, client):
        body = {"lora_name": "x", "lora_path": "/x"}
        status, answer = await post(client, "/load_lora_adapter", body, **ADMIN)
        assert status == 400
        assert "--enable-lora" in answer["error"]["message"]


async def test_metrics_tell_which_run_and_which_wait() -> None:
    async with serving(max_num_seqs=2) as (engine, client):

        async def info() -> list[str]:
            text = await (await client.get("/metrics")).get_data(True)
            return [line for line in text.splitlines() if "lora_requests_info{" in line]

        (idle,) = await info()
        names = 'max_lora="8",running_lora_adapters="",waiting_lora_adapters=""'
        assert idle.startswith(f"trioserve:lora_requests_info{{{names}}} 1.")
        async with trio.open_nursery() as nursery:
            for number, name in enumerate(("poet", "base", "poet", "pirate"), 1):
                body = {**TEXT, "model": name, "max_tokens": 1000}
                nursery.start_soon(post, client, "/v1/completions", body)
                scheduler = engine.statistics().scheduler
                while scheduler.num_running + scheduler.num_waiting < number:
                    await trio.sleep(0.001)
                    scheduler = engine.statistics().scheduler
            (busy,) = await info()
            assert 'running_lora_adapters="poet"' in busy
            assert 'waiting_lora_adapters="pirate,poet"' in busy
            nursery.cancel_scope.cancel()
    async with serving(lora_modules=[]) as (_, client):
        text = await (await client.get("/metrics")).get_data(True)
        assert "lora_requests_info{" not in text


async def test_encode_takes_an_adapter() -> None:
    async with serving() as (_, client):
        status, answer = await post(client, "/encode", {"text": ["a", "b"], "lora_path": "poet"})
        assert (status, len(answer)) == (200, 2)
        status, answer = await post(client, "/encode", {"text": "a", "lora_path": "nobody"})
        assert (status, answer["error"]["param"]) == (404, "lora_path")


async def test_prompt_adapters_come_by_the_same_routes(tmp_path: Path) -> None:
    """They are loaded, named and unloaded as LoRA adapters are, and beside them."""
    prefix = write_prompt_adapter(tmp_path / "prefix", count=20, width=EMBEDDING_WIDTH)
    async with serving() as (engine, client):

        async def control(verb: str, **body: Any) -> tuple[int, Any]:
            return await post(client, f"/v1/{verb}_lora_adapter", body, **ADMIN)

        status, answer = await control("load", lora_name="prefix", lora_path=str(prefix))
        assert (status, answer["loaded_adapters"]["prefix"]) == (200, str(prefix))
        cards = (await get(client, "/v1/models"))["data"]
        assert (cards[-1]["id"], cards[-1]["parent"], cards[-1]["root"]) == (
            "prefix",
            "base",
            str(prefix),
        )
        texts, fields = set(), {"seed": 1, "return_token_ids": True, "echo": True}
        for name in ("base", "poet", "prefix", "prefix"):
            status, answer = await post(
                client, "/v1/completions", {**TEXT, **fields, "model": name}
            )
            (choice,) = answer["choices"]
            assert (status, answer["usage"]["prompt_tokens"]) == (200, 5), answer
            assert choice["prompt_token_ids"] == engine.tokenizer.encode("hello")
            assert choice["text"].startswith("hello")
            texts.add(choice["text"])
        assert len(texts) == 3
        for path, body, param, told in (
            ("completions", {**TEXT, "echo": True, "logprobs": 1}, "logprobs", "adapter 'prefix'"),
            ("completions", {**TEXT, "repetition_penalty": 1.2}, "repetition_penalty", "leave it"),
            ("embeddings", {"input": "hello"}, "model", "for generating only"),
        ):
            status, answer = await post(client, f"/v1/{path}", {**body, "model": "prefix"})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert told in answer["error"]["message"]
        status, answer = await control("unload", lora_name="prefix")
        assert (status, list(answer["loaded_adapters"])) == (200, ["pirate", "poet"])
        assert (await post(client, "/v1/completions", {**TEXT, "model": "prefix"}))[0] == 404
        assert engine.statistics().scheduler.pages_held == 0


async def test_prompt_adapters_that_can_t_be_loaded(tmp_path: Path) -> None:
    wide = write_prompt_adapter(tmp_path / "wide", count=20, width=EMBEDDING_WIDTH + 1)
    long = write_prompt_adapter(tmp_path / "long", count=4000, width=EMBEDDING_WIDTH)
    partial = write_prompt_adapter(tmp_path / "partial", count=3, width=EMBEDDING_WIDTH)
    (partial / "adapter_model.safetensors").unlink()
    async with serving() as (engine, client):
        for path, told in (
            (wide, "prompt_embeddings is [20, 5]"),
            (long, "num_virtual_tokens = 4000, which leave no room"),
            (partial, "has no adapter_model.safetensors"),
        ):
            status, answer = await post(
                client,
                "/v1/load_lora_adapter",
                {"lora_name": "x", "lora_path": str(path)},
                **ADMIN,
            )
            assert (status, answer["error"]["param"]) == (400, "lora_path")
            assert answer["error"]["message"].startswith(f"lora_path: {path}")
            assert told in answer["error"]["message"]
        assert len(engine.adapters) == 2
