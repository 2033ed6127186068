"""Defaults of requests: where they come from, what replaces them, and how long outputs get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.support.front_ends import open_server
from tests.support.http_stub import StubEngine, http_client, served, server_config
from trioserve import EngineConfig, InvalidRequest, ModelLoadError, SamplingParams
from trioserve.engine.loaded_model import chosen_generation_config
from trioserve.http import create_app
from trioserve.model_files import locate, open_model
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.testing.fake_engine import open_fake_engine

OWN = GenerationConfig(sampling={"temperature": 0.6, "top_k": 20}, max_tokens=100)


def chosen(own: GenerationConfig = OWN, **options: Any) -> GenerationConfig:
    return chosen_generation_config(own, EngineConfig("m", **options))


def test_the_model_brings_its_own() -> None:
    assert chosen() == OWN


def test_the_demo_model_does_not_ramble() -> None:
    """At temperature 1 and without an end it writes nonsense for thousands of tokens."""
    shown = open_model(locate("smollm2-135m")).generation.shown()
    assert shown == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}


def test_vllm_is_none_and_a_folder_is_another(tmp_path: Path) -> None:
    assert chosen(generation_config="vllm") == GenerationConfig()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.1, "max_new_tokens": 7}))
    for given in (tmp_path, path):
        other = chosen(generation_config=str(given))
        assert other == GenerationConfig(sampling={"temperature": 0.1}, max_tokens=7, most_tokens=7)
    with pytest.raises(ModelLoadError, match=r"nowhere.* is missing"):
        chosen(generation_config=str(tmp_path / "nowhere"))


def test_an_override_replaces_single_values() -> None:
    given = '{"temperature": 0, "top_k": null, "min_p": 0.1}'
    assert chosen(override_generation_config=given) == GenerationConfig(
        sampling={"temperature": 0, "min_p": 0.1}, max_tokens=100
    )
    alone = chosen(generation_config="vllm", override_generation_config=given)
    assert alone.shown() == {"temperature": 0, "min_p": 0.1}
    limited = chosen(override_generation_config='{"max_new_tokens": 30}')
    assert (limited.max_tokens, limited.most_tokens) == (30, 30)


def test_the_default_length_is_the_option_s_within_the_limit() -> None:
    assert chosen(max_tokens_default=300).max_tokens == 300
    assert chosen(max_tokens_default=300).most_tokens is None
    limited = chosen(max_tokens_default=300, override_generation_config='{"max_new_tokens": 30}')
    assert (limited.max_tokens, limited.most_tokens) == (30, 30)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temperature=1", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"max_tokens": 5, "stop": "x"}', "has max_tokens, stop; it takes repetition_penalty"),
        ('{"temperature": -1}', "temperature must be"),
        ('{"top_k": "five"}', "top_k must be"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be an integer of at least 1"),
        ('{"max_new_tokens": true}', "max_new_tokens must be an integer of at least 1"),
    ],
)
def test_a_wrong_override_is_refused_before_anything_is_loaded(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        EngineConfig("m", override_generation_config=text)
    assert caught.value.param == "override_generation_config"


async def lengths(engine: Any, *asked: dict[str, Any]) -> list[int]:
    return [len((await engine.complete("hello", **each)).token_ids) for each in asked]


async def test_an_output_without_max_tokens_has_the_default_length(
    autojump_clock: MockClock,
) -> None:
    async with open_fake_engine(max_tokens_default=12, max_model_len=64) as engine:
        assert await lengths(
            engine,
            {},
            {"params": SamplingParams()},
            {"max_tokens": 40},  # more may be asked for
            {"min_tokens": 20},  # which asks for more
        ) == [12, 12, 40, 20]
        long = await engine.complete([65] * 60)  # less is left
        assert len(long.token_ids) == 4


async def test_a_limit_holds_for_all(autojump_clock: MockClock) -> None:
    override = '{"max_new_tokens": 5}'
    async with open_fake_engine(override_generation_config=override) as engine:
        assert await lengths(engine, {}, {"max_tokens": 40}, {"max_tokens": 3}) == [5, 5, 3]
        with pytest.raises(InvalidRequest, match="min_tokens must be at most 5"):
            await engine.complete("hello", min_tokens=6)


async def test_front_ends_send_the_default_along(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with open_server(tmp_path, max_tokens_default=6) as server:
            engine = server.front_ends[0].engine
            assert await lengths(engine, {}, {"max_tokens": 9}) == [6, 9]


async def test_what_each_api_gets_that_names_no_length() -> None:
    config = GenerationConfig(sampling={"top_k": 3}, max_tokens=10)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    engine = StubEngine(generation=config)
    async with served(engine) as url, http_client(url) as client:
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": "hi"}),
            ("/generate", {"text": "hi"}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
    # None is the engine's default; the other two have one of their own, which is the larger.
    assert [call.params.max_tokens for call in engine.calls] == [None, 10, 10]


async def test_the_server_shows_them(autojump_clock: MockClock) -> None:
    options: dict[str, Any] = {"max_tokens_default": 9, "generation_defaults": {"top_k": 3}}
    async with open_fake_engine(**options) as engine:
        client = create_app(engine, server_config()).test_client()
        info = json.loads(await (await client.get("/server_info")).get_data())
    assert info["default_sampling_params"] == {"top_k": 3, "max_tokens": 9}
