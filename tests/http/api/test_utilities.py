"""The endpoints beside the generating ones, over a whole engine with a fake worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import tokenizers
import trio
from quart_trio.testing import TrioClient

import trioserve
from tests.support.http_stub import StubEngine, client_of, http_client, served, server_config
from trioserve.config import EngineConfig, ServerConfig
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.api.utilities.endpoint import shown_options
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine
from trioserve.text.chat_template import ChatTemplate


@contextlib.asynccontextmanager
async def serving(
    make_worker: Callable[[], FakeWorker] = FakeWorker,
    server: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Engine, TrioClient]]:
    async with open_fake_engine(make_worker, **options) as engine:
        yield engine, create_app(engine, server_config(**(server or {}))).test_client()


async def get(client: TrioClient, path: str, *, status: int = 200) -> Any:
    response = await client.get(path)
    assert response.status_code == status
    return json.loads(await response.get_data(True))


async def post(client: TrioClient, path: str, body: Any, *, status: int = 200) -> Any:
    response = await client.post(path, json=body)
    data = json.loads(await response.get_data(True))
    assert response.status_code == status, data
    return data


def with_special_tokens() -> tokenizers.Tokenizer:
    """Return a tokenizer with a token for each byte, and a begin token added to every text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<begin>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 256)]
    )
    return tokenizer


MESSAGES = [{"role": "user", "content": "Hi"}]


class TestTokenize:
    @pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
    async def test_a_text_and_back(self, path: str) -> None:
        async with serving(tokenizer=with_special_tokens()) as (engine, client):
            reply = await post(client, path, {"prompt": "héllo", "model": "fake"})
            ids = engine.tokenizer.encode("héllo")
            assert reply == {
                "count": 7,
                "max_model_len": engine.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            assert ids[0] == 256
            back = {"tokens": ids}
            whole = await post(client, path.replace("tokenize", "detokenize"), back)
            assert whole == {"prompt": "<begin>héllo", "text": "<begin>héllo"}
            whole = await post(client, "/detokenize", {**back, "skip_special_tokens": True})
            assert whole["prompt"] == "héllo"

    async def test_several_texts(self) -> None:
        async with serving(tokenizer=with_special_tokens()) as (engine, client):
            body = {"prompt": ["a", "bc"], "add_special_tokens": False, "return_token_strs": True}
            reply = await post(client, "/tokenize", body)
            expected = [
                engine.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "bc")
            ]
            assert reply["tokens"] == expected
            assert reply["count"] == [1, 2]
            assert reply["token_strs"] == [["a"], ["b", "c"]]
            texts = await post(client, "/detokenize", {"tokens": expected})
            assert texts == {"prompt": ["a", "bc"], "text": ["a", "bc"]}
            assert (await post(client, "/tokenize", {"prompt": ["a"]}))["count"] == [2]
            assert (await post(client, "/detokenize", {"tokens": []}))["prompt"] == ""

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({}, "user: Hi\nassistant:"),
            ({"add_generation_prompt": False}, "user: Hi\n"),
            ({"continue_final_message": True}, "user: Hi"),
            ({"add_special_tokens": True}, "<begin>user: Hi\nassistant:"),
        ],
    )
    async def test_a_chat(self, fields: dict[str, Any], text: str) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        async with serving(tokenizer=with_special_tokens()) as (engine, client):
            reply = await post(client, "/tokenize", {"messages": messages, **fields})
            assert engine.tokenizer.decode(reply["tokens"], skip_special_tokens=False) == text
            if "add_special_tokens" not in fields:
                body = {"messages": messages, **fields}
                assert await post(client, "/apply-template", body) == {"prompt": text}
            if not fields:
                completion = await engine.complete(messages, max_tokens=1)
                assert reply["tokens"] == list(completion.prompt_token_ids)

    async def test_a_template_that_writes_more_than_a_prompt_may_hold(self) -> None:
        async with serving() as (engine, client):
            engine.tokenizer.chat_template = ChatTemplate("{{ 'x' * 600_000 }}")
            for path in ("/tokenize", "/apply-template"):
                error = (await post(client, path, {"messages": MESSAGES}, status=400))["error"]
                assert error["param"] == "messages"
                assert "600000 characters" in error["message"]

    async def test_what_the_template_is_given(self) -> None:
        template = (
            "{{ messages[0].content }}{{ mood }}"
            "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        )
        async with serving() as (engine, _):
            engine.tokenizer.chat_template = ChatTemplate(template)
            app = create_app(engine, server_config(tool_call_parser="hermes"))
            body = {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "chat_template_kwargs": {"mood": "b"},
                "tools": [{"type": "function", "function": {"name": "c"}}],
            }
            reply = await post(app.test_client(), "/tokenize", body)
            assert engine.tokenizer.decode(reply["tokens"]) == "abc"
            reply = await post(app.test_client(), "/apply-template", body)
            assert reply == {"prompt": "abc"}
            reply = await post(app.test_client(), "/tokenize", {**body, "tool_choice": "none"})
            assert engine.tokenizer.decode(reply["tokens"]) == "ab"

    async def test_long_texts_are_encoded_beside_the_event_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        in_threads: list[Any] = []
        run_sync = trio.to_thread.run_sync

        async def noting(work: Any, *args: Any, **options: Any) -> Any:
            in_threads.append(work)
            return await run_sync(work, *args, **options)

        monkeypatch.setattr(trio.to_thread, "run_sync", noting)
        async with serving() as (_, client):
            assert (await post(client, "/tokenize", {"prompt": "x" * 1000}))["count"] == 1000
            assert not in_threads
            reply = await post(client, "/tokenize", {"prompt": "x" * 3000})
            assert reply["count"] == 3000
            assert len(in_threads) == 1
            await post(client, "/detokenize", {"tokens": reply["tokens"]})
            assert len(in_threads) == 2

    @pytest.mark.parametrize(
        ("path", "body", "status", "param"),
        [
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
            ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
            ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
            ("/tokenize", {"prompt": []}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "chat_template": "{{ x }}"}, 400, "chat_template"),
            ("/tokenize", {"prompt": "a", "other": 1}, 400, "other"),
            ("/apply-template", {}, 400, "messages"),
            ("/apply-template", {"messages": MESSAGES, "model": "other"}, 404, "model"),
            ("/apply-template", {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template"),
            ("/detokenize", {}, 400, "tokens"),
            ("/detokenize", {"tokens": [1, [2]]}, 400, "tokens"),
            ("/detokenize", {"tokens": [[1], [256]]}, 400, "tokens"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
            ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ],
    )
    async def test_refusals(self, path: str, body: Any, status: int, param: str) -> None:
        async with serving() as (_, client):
            error = (await post(client, path, body, status=status))["error"]
            assert error["param"] == param

    async def test_a_model_without_a_template(self) -> None:
        async with serving() as (engine, client):
            engine.tokenizer.chat_template = None
            body = {"messages": [{"role": "user", "content": "a"}]}
            error = (await post(client, "/tokenize", body, status=400))["error"]
            assert "no chat template" in error["message"]
            assert (await post(client, "/apply-template", body, status=400))["error"] == error
            assert (await get(client, "/tokenizer_info"))["chat_template"] is None


async def test_tokenizer_info() -> None:
    async with serving(tokenizer=with_special_tokens(), eos_token_ids=(7,)) as (engine, client):
        info = await get(client, "/tokenizer_info")
        assert info.pop("chat_template").startswith("{% for message in messages %}")
        assert info == {
            "tokenizer_class": "tokenizers.BPE",
            "vocab_size": 257,
            "model_max_length": engine.max_model_len,
            "special_tokens": {"<begin>": 256},
            "bos_token": None,
            "eos_token": None,
            "eos_token_ids": [7],
        }


async def test_who_is_here() -> None:
    async with served(StubEngine(), root_path="/llm") as url, http_client(url) as client:
        assert (await client.get("/version")).json() == {"version": trioserve.__version__}
        assert (await client.get("/")).json() == {
            "name": "trioserve",
            "version": trioserve.__version__,
            "description": "/llm/openapi.json",
        }
        response = await client.head("/")
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("root_path", ["/llm", "/llm/"])
async def test_paths_with_the_prefix_of_a_proxy_and_without(root_path: str) -> None:
    async with served(StubEngine(), root_path=root_path) as url, http_client(url) as client:
        for path in ("/llm/version", "/version"):
            assert (await client.get(path)).json() == {"version": trioserve.__version__}
        assert (await client.get("/llm")).json()["name"] == "trioserve"
        for path in ("/llmversion", "/llm/llm/version", "/other/version"):
            assert (await client.get(path)).status_code == 404
        # Errors at a dialect's paths have its form there, too.
        error = (await client.post("/llm/v1/messages", json={})).json()
        assert error["type"] == "error"


async def test_model_info() -> None:
    async with serving(generation_defaults={"top_p": 0.9}) as (engine, client):
        info = await get(client, "/model_info")
        assert info == await get(client, "/get_model_info")
        assert info == {
            "model_path": "fake",
            "tokenizer_path": "fake",
            "is_generation": True,
            "preferred_sampling_params": {"top_p": 0.9},
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_model_len": engine.max_model_len,
            "vocab_size": engine.vocab_size,
        }


async def test_server_info_tells_options_and_no_secrets() -> None:
    secret = "s3cret"
    server = {"api_key": (secret,), "served_model_name": ("one", "two")}
    endpoint = f"http://me:{secret}@collector:4318/v1/traces"
    async with serving(server=server, max_num_seqs=3, otlp_traces_endpoint=endpoint) as (
        engine,
        client,
    ):
        headers = {"Authorization": f"Bearer {secret}"}
        for path in ("/server_info", "/get_server_info"):
            response = await client.get(path, headers=headers)
            text = await response.get_data(True)
            assert secret not in text
            info = json.loads(text)
            assert info["served_model_name"] == ["one", "two"]
            assert info["options"]["max_num_seqs"] == 3
            assert info["page_size"] == engine.ready.page_size
            assert info["options"]["otlp_traces_endpoint"] == "http://collector:4318/v1/traces"
            assert info["worker"]["num_pages"] == engine.ready.num_pages
            assert info["max_total_num_tokens"] == engine.ready.num_pages * engine.ready.page_size


def test_every_option_but_the_secret_ones_is_shown() -> None:
    shown = shown_options(ServerConfig(engine=EngineConfig("x"), api_key=("k",)))
    assert {"host", "max_num_seqs", "grammar_timeout"} < set(shown)
    assert "api_key" not in shown


async def test_load(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(lambda: FakeWorker(step_time=1.0), max_num_seqs=2) as (engine, client):
        idle = await get(client, "/load")
        assert idle["server_load"] == idle["num_reqs"] == idle["num_tokens"] == 0
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(engine.generate("hello", max_tokens=100))
            await trio.sleep(2.5)
            load = await get(client, "/load")
            assert load["server_load"] == load["num_reqs"] == 3
            assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 1)
            assert load["max_total_num_tokens"] > load["num_tokens"] > 0
            assert await get(client, "/get_load") == [
                {
                    "dp_rank": 0,
                    "num_reqs": 3,
                    "num_waiting_reqs": 1,
                    "num_tokens": load["num_tokens"],
                }
            ]


async def test_ping_is_health() -> None:
    stub = StubEngine()
    client = client_of(stub, api_key=("key",))
    for healthy, status in ((True, 200), (False, 503)):
        stub.healthy = healthy
        for response in (await client.get("/ping"), await client.post("/ping")):
            assert response.status_code == status
            word = json.loads(await response.get_data(True))
            assert word == {"status": "ok" if healthy else "no_worker"}


class TestHealthGenerate:
    async def test_a_token_is_computed(self) -> None:
        async with serving() as (engine, client):
            before = engine.statistics().scheduler.num_tokens_sampled
            assert await get(client, "/health_generate") == {"status": "ok"}
            assert engine.statistics().scheduler.num_tokens_sampled == before + 1

    async def test_it_overtakes_what_waits(self, autojump_clock: trio.testing.MockClock) -> None:
        options: dict[str, Any] = {"max_num_seqs": 1, "scheduling_policy": "priority"}
        async with serving(lambda: FakeWorker(step_time=0.1), **options) as (engine, client):
            async with engine.generate("a", max_tokens=50), engine.generate("b", max_tokens=500):
                assert await get(client, "/health_generate") == {"status": "ok"}
                assert trio.current_time() < 10

    async def test_what_takes_too_long_is_a_503(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with serving(lambda: FakeWorker(step_time=100.0)) as (_, client):
            start = trio.current_time()
            assert await get(client, "/health_generate", status=503) == {"status": "timeout"}
            assert trio.current_time() - start == pytest.approx(20)

    async def test_a_full_queue_and_a_draining_engine_are_503s(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        options: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
        async with serving(lambda: FakeWorker(step_time=1.0), **options) as (engine, client):
            async with engine.generate("a", max_tokens=50):
                await trio.sleep(0.5)
                async with engine.generate("b", max_tokens=50):
                    assert await get(client, "/health_generate", status=503) == {"status": "busy"}
            engine.drain()
            assert await get(client, "/health_generate", status=503) == {"status": "draining"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
)
async def test_a_body_has_to_be_sent_as_json(headers: dict[str, str], status: int) -> None:
    client = client_of(StubEngine())
    response = await client.post("/generate", data=b'{"text": "x"}', headers=headers)
    assert response.status_code == status
    if status != 200:
        error = json.loads(await response.get_data(True))["error"]
        assert error["code"] == "unsupported_media_type"
        assert "application/json" in error["message"]
