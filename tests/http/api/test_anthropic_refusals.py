"""Anthropic's messages that are refused or fail, and their errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.api.test_anthropic import (
    PATH,
    TOOLS,
    WEATHER,
    events,
    refusal,
)
from tests.support.chats import CALLS, HERMES, MESSAGES, engine
from tests.support.http_stub import (
    Call,
    StubEngine,
    StubTokenizer,
    app_of,
    client_of,
)
from trioserve.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    QueueFull,
)
from trioserve.requests.stream import Chunk


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "begin"),
        [
            ({"max_tokens": None}, "max_tokens: "),
            ({"max_tokens": -1}, "max_tokens: "),
            ({"messages": []}, "messages: "),
            ({"temperature": -1}, "temperature: "),
            ({"stop": ["x"]}, "stop is not a field"),
            ({"stop_sequences": ["x"] * 100}, "stop_sequences: "),
            ({"container": "x"}, "container isn't served"),
            ({"service_tier": "priority"}, "service_tier isn't served"),
            ({"mcp_servers": [{}]}, "mcp_servers isn't served"),
            ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
            ({"tools": [WEATHER, WEATHER]}, "tools[1].name is 'weather'"),
            (
                {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}},
                "tool_choice.name names 'other'",
            ),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]."),
            ({"thinking": {"type": "deep"}}, "thinking.type: invalid value 'deep', expected one"),
        ],
    )
    async def test_fields(self, body: dict[str, Any], begin: str) -> None:
        message = await refusal(engine(CALLS), **body)
        assert message.startswith(begin)

    @pytest.mark.parametrize("kind", ["document", "search_result", "redacted_thinking"])
    async def test_blocks_that_are_not_read(self, kind: str) -> None:
        block = {"type": kind, "source": {"type": "url", "url": "http://localhost/x"}}
        message = await refusal(engine("a"), messages=[{"role": "user", "content": [block]}])
        assert message.startswith(f"messages[0].content[0].type: invalid value '{kind}', expected")

    async def test_an_image_for_a_model_of_texts(self) -> None:
        block = {"type": "image", "source": {"type": "url", "url": "http://localhost/x"}}
        message = await refusal(engine("a"), messages=[{"role": "user", "content": [block]}])
        assert message.startswith("messages: this model reads text only")

    @pytest.mark.parametrize(
        ("role", "block"),
        [
            ("user", {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
            ("user", {"type": "thinking", "thinking": "x"}),
            ("assistant", {"type": "tool_result", "tool_use_id": "t"}),
            ("system", {"type": "tool_result", "tool_use_id": "t"}),
        ],
    )
    async def test_blocks_in_the_wrong_message(self, role: str, block: Any) -> None:
        messages = [*MESSAGES, {"role": role, "content": [block]}]
        message = await refusal(engine("a"), messages=messages)
        where = "messages[1].content[0].type"
        expected = f"{where}: {block['type']} has no place in a message of {role}"
        assert message == expected

    async def test_calls_without_results(self) -> None:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        messages = [*MESSAGES, {"role": "assistant", "content": [use]}]
        assert (await refusal(engine("a"), messages=messages)).startswith("messages[1] calls tools")

    @pytest.mark.parametrize(
        ("param", "expected"),
        [
            ("stop", "stop_sequences is too much"),
            ("grammar", "output_config.format is too much"),
            ("prompt", "messages is too much"),
        ],
    )
    async def test_a_field_that_is_refused_late(self, param: str, expected: str) -> None:
        async def admit(_: Call) -> None:
            raise InvalidRequest(f"{param} is too much", param=param)

        stub = StubEngine(admit=admit, tokenizer=StubTokenizer(HERMES))
        asked = {"type": "json_schema", "schema": {"type": "object"}}
        message = await refusal(stub, output_config={"format": asked})
        assert message == expected


class TestErrors:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("error", "status", "kind"),
        [
            (ContextTooLong("long"), 400, "invalid_request_error"),
            (QueueFull("full", retry_after=1.2), 429, "rate_limit_error"),
            (Draining("going"), 503, "overloaded_error"),
            (DeadlineExceeded("late"), 504, "timeout_error"),
            (EngineError("broken"), 500, "api_error"),
        ],
    )
    async def test_before_a_stream(
        self, error: Exception, status: int, kind: str, stream: bool
    ) -> None:
        async def admit(_: Call) -> None:
            raise error

        body = {"messages": MESSAGES, "max_tokens": 5, "stream": stream}
        response = await client_of(StubEngine(admit=admit)).post(PATH, json=body)
        assert response.status_code == status
        assert response.content_type == "application/json"
        assert await response.get_json() == {
            "type": "error",
            "error": {"type": kind, "message": str(error)},
        }
        assert ("Retry-After" in response.headers) is (status in (429, 503))
        assert response.headers["Request-Id"] == response.headers["X-Request-Id"]

    async def test_in_a_stream(self) -> None:
        stub = StubEngine(script=lambda _: [Chunk("a", (97,)), EngineError("broken")])
        *_, last = await events(stub)
        assert last == {"type": "error", "error": {"type": "api_error", "message": "broken"}}

    async def test_of_http(self) -> None:
        app = app_of(StubEngine(), max_body_size=1000)
        client = app.test_client()
        body = {"messages": MESSAGES, "max_tokens": 5}
        for response, status, kind in (
            (await client.get(PATH), 405, "invalid_request_error"),
            (await client.post(PATH + "/batches", json={}), 404, "not_found_error"),
            (
                await client.post(PATH, json={**body, "model": "other"}),
                404,
                "not_found_error",
            ),
            (await client.post(PATH, data=b"x" * 2000), 413, "request_too_large"),
            (
                await client.post(PATH, data="x", headers={"Content-Type": "text/plain"}),
                415,
                "invalid_request_error",
            ),
        ):
            assert response.status_code == status
            error = await response.get_json()
            assert (error["type"], error["error"]["type"]) == ("error", kind)

    async def test_keys(self) -> None:
        client = client_of(StubEngine(), api_key=("one",))
        body = {"messages": MESSAGES, "max_tokens": 5}
        for headers, status in (
            ({"x-api-key": "one", "anthropic-version": "2023-06-01"}, 200),
            ({"Authorization": "Bearer one"}, 200),
            ({"x-api-key": "two"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "one", "Authorization": "Bearer two"}, 401),
            ({}, 401),
        ):
            response = await client.post(PATH, json=body, headers=headers)
            assert response.status_code == status, headers
            if status == 401:
                error = await response.get_json()
                assert error["error"]["type"] == "authentication_error"
        assert (await client.get("/v1/models", headers={"x-api-key": "one"})).status_code == 200
