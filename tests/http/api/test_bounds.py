"""Limits on one HTTP request: each error names the field, the limit and its option."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio.testing

from tests.support.asgi_client import ask
from tests.support.http_stub import StubEngine, app_of, client_of, with_logprobs, words
from trioserve import EngineConfig
from trioserve.config import ServerConfig
from trioserve.http import create_app
from trioserve.http.api import bounds
from trioserve.http.api.schema import reading as schemas
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = {"function": {"name": "f"}}
FUNCTION = {"name": "f"}


async def refusal(path: str, body: Any, stub: StubEngine | None = None, **options: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client_of(stub or StubEngine(), **options).post(
        path, data=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, await response.get_data(True)
    return json.loads(await response.get_data(True))["error"]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [MESSAGE], **fields}


TOO_MUCH: list[tuple[str, Any, str, int]] = [
    # path, body, field, the most that is allowed
    (CHAT, {"messages": [MESSAGE] * 2049}, "messages", 2048),
    (CHAT, {"messages": [{"role": "u", "content": [PART] * 1025}]}, "messages[0].content", 1024),
    (
        CHAT,
        {"messages": [{"role": "a", "tool_calls": [CALL] * 129}]},
        "messages[0].tool_calls",
        128,
    ),
    (CHAT, chat(tools=[{"function": FUNCTION}] * 129), "tools", 128),
    (CHAT, chat(functions=[FUNCTION] * 129), "functions", 128),
    (CHAT, chat(documents=[{}] * 1025), "documents", 1024),
    (CHAT, chat(stop=["x"] * 65), "stop", 64),
    (CHAT, chat(stop="x" * 1025), "stop", 1024),
    (CHAT, chat(stop_regex=["x"] * 65), "stop_regex", 64),
    (CHAT, chat(logit_bias={str(id): 1 for id in range(1025)}), "logit_bias", 1024),
    (CHAT, chat(bad_words=["x"] * 257), "bad_words", 256),
    (CHAT, chat(stop_token_ids=[1] * ((1 << 20) + 1)), "stop_token_ids", 1 << 20),
    (CHAT, chat(allowed_token_ids=[1] * ((1 << 20) + 1)), "allowed_token_ids", 1 << 20),
    (CHAT, chat(n=129), "n", 128),
    (CHAT, chat(regex="x" * ((256 << 10) + 1)), "regex", 256 << 10),
    (CHAT, chat(ebnf="x" * ((256 << 10) + 1)), "ebnf", 256 << 10),
    (CHAT, chat(json_schema="x" * ((256 << 10) + 1)), "json_schema", 256 << 10),
    (CHAT, chat(guided_choice=["x" * 1000] * 300), "guided_choice", 256 << 10),
    (CHAT, chat(guided_json={"enum": ["x" * 1000] * 300}), "guided_json", 256 << 10),
    (
        CHAT,
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": ["x" * 1000] * 300}},
            }
        ),
        "response_format",
        256 << 10,
    ),
    (CHAT, chat(request_id="x" * 257), "request_id", 256),
    (TEXT, {"prompt": ["x"] * 4}, "prompt", 3),
    (TEXT, {"prompt": [[1]] * 4}, "prompt", 3),
    (NATIVE, {"text": ["x"] * 4}, "text", 3),
    (NATIVE, {"input_ids": [[1]] * 4}, "input_ids", 3),
    ("/tokenize", {"prompt": ["x"] * 4}, "prompt", 3),
    ("/tokenize", {"messages": [MESSAGE] * 2049}, "messages", 2048),
    ("/detokenize", {"tokens": [[1]] * 4}, "tokens", 3),
    (TEXT, {"prompt": ["x"] * 3, "n": 100}, "n", 250),
    (TEXT, {"prompt": ["x"] * 3, "best_of": 100}, "best_of", 250),
    (NATIVE, {"text": ["x"] * 3, "sampling_params": {"n": 100}}, "sampling_params.n", 250),
    (TEXT, {"prompt": [[1] * 300] * 2, "n": 2}, "prompt", 1000),
    (NATIVE, {"input_ids": [[1] * 600] * 2}, "input_ids", 1000),
]


@pytest.mark.parametrize(("path", "body", "field", "most"), TOO_MUCH)
async def test_too_much_is_refused_with_the_field_and_the_limit(
    path: str, body: Any, field: str, most: int
) -> None:
    stub = StubEngine(
        config=EngineConfig("stub", max_num_queued_reqs=250), max_num_queued_tokens=1000
    )
    error = await refusal(path, body, stub, max_prompts_per_request=3)
    assert error["param"].startswith(field)
    assert field.rpartition(".")[2].rpartition("]")[2] in error["message"]
    assert str(most) in error["message"]
    assert not stub.calls


@pytest.mark.parametrize(
    ("path", "body", "option"),
    [
        (TEXT, {"prompt": ["x"] * 4}, "--max-prompts-per-request"),
        (TEXT, {"prompt": ["x"] * 3, "n": 100}, "--max-num-queued-reqs"),
        (TEXT, {"prompt": [[1] * 300] * 2, "n": 2}, "--max-num-queued-tokens"),
    ],
)
async def test_what_an_option_bounds_says_so(path: str, body: Any, option: str) -> None:
    stub = StubEngine(
        config=EngineConfig("stub", max_num_queued_reqs=250), max_num_queued_tokens=1000
    )
    error = await refusal(path, body, stub, max_prompts_per_request=3)
    assert option in error["message"]


async def test_as_many_as_may_be_are_served() -> None:
    stub = StubEngine(config=EngineConfig("stub", max_num_queued_reqs=3))
    client = client_of(stub, max_prompts_per_request=3)
    for path, body in (
        (TEXT, {"prompt": ["x"] * 3}),
        (NATIVE, {"text": ["x"] * 3}),
        (CHAT, {"messages": [MESSAGE] * 2048}),
        (CHAT, {"messages": [{"role": "user", "content": [PART] * 1024}]}),
    ):
        assert (await client.post(path, json=body)).status_code == 200


class TestBodies:
    """Large bodies are scanned before they are parsed, so that other requests aren't held up."""

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"messages":[' + b'{"role":"u"},' * 70_000 + b"{}]}", "140004 objects, lists"),
            (b'{"prompt":[' + b"[1]," * 131_072 + b"[1]]}", "131076 objects, lists"),
            (b'{"user":{' + b'"":[],' * 70_000 + b"}}", "140003 objects, lists"),
            (b'{"prompt":[' + b"1," * 2_200_000 + b"1]}", "2200000 values"),
            (b'{"prompt":"x","stop_token_ids":[' + b"1," * 2_200_000 + b"1]}", "values; at most"),
        ],
    )
    async def test_too_many_values(
        self, body: bytes, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(schemas, "_decode", lambda *_: pytest.fail("the body was read"))
        error = await refusal(CHAT if b"messages" in body else TEXT, body)
        assert message in error["message"]
        assert (
            str(bounds.MAX_FIELDS if "lists" in message else bounds.MAX_VALUES) in error["message"]
        )

    async def test_a_long_text_is_fine(self) -> None:
        stub = StubEngine(max_model_len=1 << 30)
        text = 'a, b, c {d: [e]} "f:\\g"\n' * 40_000
        response = await client_of(stub).post(TEXT, json={"prompt": [text] * 10})
        assert response.status_code == 200

    async def test_nesting(self) -> None:
        deep = b"[" * 100_000 + b"]" * 100_000
        for path, body in (
            (CHAT, b'{"messages":[{"role":"u"}],"chat_template_kwargs":{"a":' + deep + b"}}"),
            (CHAT, b'{"messages":[{"role":"u"}],"guided_json":{"a":' + deep + b"}}"),
            (TEXT, b'{"prompt":"x","vllm_xargs":{"a":' + deep + b"}}"),
        ):
            assert "nested too deeply" in (await refusal(path, body))["message"]


async def test_prompt_logprobs_are_bounded_over_a_batch(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_PROMPT_LOGPROBS", 1000)
    async with open_fake_engine(lambda: FakeWorker()) as engine:
        app = create_app(engine, ServerConfig(engine=engine.config))
        for path, body, field in (
            (
                TEXT,
                {"prompt": [[1] * 100] * 4, "prompt_logprobs": 2, "max_tokens": 1},
                "prompt_logprobs",
            ),
            (
                TEXT,
                {
                    "prompt": [[1] * 100] * 4,
                    "logprobs": 2,
                    "echo": True,
                    "max_tokens": 1,
                    "stream": True,
                },
                "logprobs",
            ),
            (
                NATIVE,
                {
                    "input_ids": [[1] * 100] * 4,
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": 2,
                },
                "top_logprobs_num",
            ),
        ):
            answer = await ask(app, path, body)
            assert answer.status == 400
            assert answer.error["param"] == field
            assert answer.error["message"] == (
                f"{field} asks for 1188 log-probabilities of 4 prompts together: "
                "at most 1000 are served"
            )
        assert engine.statistics().num_streams == 0
        await trio.sleep(1)
        engine.check_integrity()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (TEXT, {"prompt": "x", "logprobs": 2}, "logprobs"),
        (TEXT, {"prompt": ["x", "y"], "logprobs": 2}, "logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=2), "top_logprobs"),
        (NATIVE, {"text": "x", "return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num"),
    ],
)
async def test_an_answer_that_is_held_is_bounded_and_a_stream_is_not(
    monkeypatch: pytest.MonkeyPatch, path: str, body: Any, field: str
) -> None:
    monkeypatch.setattr(bounds, "MAX_ANSWER_LOGPROBS", 100)
    stub = StubEngine(
        script=lambda _: [with_logprobs(step, 2) for step in words("ab " * 50)]  # type: ignore[arg-type]
    )
    error = await refusal(path, body, stub)
    assert error["param"] == field
    assert "more than 100 log-probabilities" in error["message"]
    assert all(call.left.is_set() for call in stub.calls)
    answer = await ask(app_of(stub), path, {**body, "stream": True})
    assert answer.status == 200
    assert answer.events[-1] == "[DONE]"
