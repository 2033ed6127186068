"""Anthropic's ``/v1/messages``: what its fields become, and what its answers and events are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats import CALLS, HERMES, MESSAGES, THINKS, engine
from tests.support.http_stub import (
    Call,
    StubEngine,
    StubTokenizer,
    app_of,
    check_leaving,
    client_of,
    http_client,
    post,
    served,
    words,
)
from trioserve.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    QueueFull,
)
from trioserve.requests.request import ChatPrompt
from trioserve.requests.stream import Chunk

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WEATHER = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
SEARCH = {"name": "search", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, SEARCH]
THOUGHTS = "<think>\nHm.\n</think>\n\n"
BOTH = f"{THOUGHTS}{CALLS}"


async def ask(stub: StubEngine, **body: Any) -> Any:
    return await post(stub, PATH, **{"messages": MESSAGES, "max_tokens": 50, **body})


async def refusal(stub: StubEngine, path: str = PATH, **body: Any) -> str:
    """Return the message of the error that is the answer."""
    asked = {"messages": MESSAGES, "max_tokens": 50, **body}
    response = await client_of(stub).post(path, json=asked)
    error = json.loads(await response.get_data(True))
    assert response.status_code == 400, error
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    message: str = error["error"]["message"]
    return message


def parsed(text: str) -> list[Any]:
    """Return the data of events; their names are their types."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def events(stub: StubEngine, **body: Any) -> list[Any]:
    asked = {"messages": MESSAGES, "max_tokens": 50, **body, "stream": True}
    async with served(stub) as url, http_client(url) as client:
        response = await client.post(PATH, json=asked)
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == "text/event-stream"
    return parsed(response.text)


def accumulated(events: list[Any]) -> Any:
    """Return the message that a client builds from a stream; assert the order of its events."""
    first, *rest, change, last = events
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    inputs: list[str] = []
    is_open = False
    for event in rest:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            inputs.append("")
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
        elif event["delta"]["type"] == "input_json_delta":
            inputs[-1] += event["delta"]["partial_json"]
        else:
            kind = event["delta"]["type"].removesuffix("_delta")
            assert block["type"] == kind
            block[kind] += event["delta"][kind]
    assert not is_open
    for block, text in zip(message["content"], inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert change["type"] == "message_delta"
    return {**message, **change["delta"], "usage": change["usage"]}


def comparable(message: Any) -> Any:
    """Without what is made by chance."""
    blocks = [{**block, "id": None} for block in message["content"]]
    return {**message, "id": None, "content": blocks}


class TestAnswers:
    async def test_whole(self) -> None:
        reply = await ask(StubEngine(script=lambda _: words("Hello there !")))
        assert reply["id"].startswith("msg_")
        assert reply == {
            "id": reply["id"],
            "type": "message",
            "role": "assistant",
            "model": "stub",
            "content": [{"type": "text", "text": "Hello there !", "citations": None}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 1,
                "output_tokens": 13,
            },
        }

    async def test_events(self) -> None:
        found = await events(StubEngine(script=lambda _: words("Hello there !")))
        assert [event["type"] for event in found] == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert found[0]["message"]["usage"]["output_tokens"] == 0
        assert found[1]["content_block"] == {"type": "text", "text": "", "citations": None}
        assert found[3]["delta"] == {"type": "text_delta", "text": "there "}
        assert found[-2]["usage"]["output_tokens"] == 13

    @pytest.mark.parametrize("size", [1, 3, 1000])
    @pytest.mark.parametrize("text", [CALLS, "No call.", CALLS[12:], BOTH, f"{THOUGHTS}Yes.", ""])
    async def test_a_stream_adds_up_to_the_whole(self, text: str, size: int) -> None:
        whole = await ask(engine(text, THINKS), tools=TOOLS)
        found = await events(engine(text, THINKS, size=size), tools=TOOLS)
        assert comparable(accumulated(found)) == comparable(whole)

    async def test_blocks(self) -> None:
        reply = await ask(engine(BOTH, THINKS), tools=TOOLS)
        thinking, text, first, second = reply["content"]
        assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert text["text"] == "Let me see."
        assert (first["type"], first["name"], first["input"]) == (
            "tool_use",
            "weather",
            {"city": "Köln"},
        )
        assert (second["name"], second["input"]) == ("search", {})
        assert first["id"] != second["id"]
        assert reply["stop_reason"] == "tool_use"

    async def test_a_call_that_is_cut_has_no_input(self) -> None:
        reply = await ask(engine(CALLS[:70], finish="length"), tools=TOOLS)
        assert reply["stop_reason"] == "max_tokens"
        assert reply["content"][-1]["input"] == {}

    @pytest.mark.parametrize(
        ("finish", "stop", "reason", "sequence"),
        [
            ("stop", None, "end_turn", None),
            ("stop", 7, "end_turn", None),
            ("stop", "END", "stop_sequence", "END"),
            ("length", None, "max_tokens", None),
        ],
    )
    async def test_how_it_ends(
        self, finish: str, stop: Any, reason: str, sequence: str | None
    ) -> None:
        stub = StubEngine(script=lambda _: words("a b", finish=finish, stop_reason=stop))
        reply = await ask(stub, stop_sequences=["END"])
        assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
        message = accumulated(await events(stub, stop_sequences=["END"]))
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert [call.params.stop for call in stub.calls] == [("END",)] * 2

    async def test_reasoning_that_is_not_wanted(self) -> None:
        for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
            reply = await ask(engine(f"{THOUGHTS}Yes.", THINKS), thinking=thinking)
            assert [block["type"] for block in reply["content"]] == ["text"]

    async def test_silence_is_broken_by_pings(self) -> None:
        stub = StubEngine(script=lambda _: [0.5, *words("late")])
        async with served(stub, keep_alive_interval=0.05) as url, http_client(url) as client:
            body = {"messages": MESSAGES, "max_tokens": 5, "stream": True}
            response = await client.post(PATH, json=body)
        first, ping, *rest = parsed(response.text)
        assert ping == {"type": "ping"}
        found = [first, *(event for event in rest if event != ping)]
        assert accumulated(found)["content"][0]["text"] == "late"


async def prompt_of(template: str = HERMES, **body: Any) -> ChatPrompt:
    stub = engine("a", template)
    await ask(stub, **body)
    prompt = stub.calls[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


class TestConversations:
    async def test_a_system_prompt(self) -> None:
        for system, content in (
            ("Be brief.", "Be brief."),
            ([text("Be brief.")], "Be brief."),
            ([{**text("A"), "cache_control": {"type": "ephemeral"}}, text("B")], None),
        ):
            first, second = (await prompt_of(system=system)).messages
            assert first["role"] == "system"
            assert first["content"] == (content or [text("A"), text("B")])
            assert second == MESSAGES[0]

    async def test_messages_of_one_role_in_a_row_are_one(self) -> None:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        prompt = await prompt_of(
            messages=[
                *MESSAGES,
                {"role": "user", "content": [text("A"), text("B")]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
                {"role": "assistant", "content": [text("C"), use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
                {"role": "user", "content": "D"},
            ]
        )
        first, second, third, last = prompt.messages
        assert first["content"] == [text("Hi"), text("A"), text("B")]
        assert second["content"] == [text("C")]
        assert second["reasoning_content"] == "Hm."
        assert [call["id"] for call in second["tool_calls"]] == ["t"]
        assert (third["role"], last) == ("tool", {"role": "user", "content": "D"})

    async def test_a_system_message_among_others(self) -> None:
        said = {"role": "system", "content": [text("Be brief.")]}
        prompt = await prompt_of(messages=[*MESSAGES, said])
        assert prompt.messages[1] == {"role": "system", "content": "Be brief."}
        assert prompt.add_generation_prompt

    async def test_turns(self) -> None:
        use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
        failed = {"type": "tool_use", "id": "t2", "name": "search", "input": {}}
        conversation = [
            {"role": "user", "content": [text("How"), text("is it?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    text("Let me see."),
                    use,
                    failed,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    text("Well?"),
                ],
            },
        ]
        prompt = await prompt_of(messages=conversation, tools=TOOLS)
        asked, answer, first, second, last = prompt.messages
        assert asked == {"role": "user", "content": [text("How"), text("is it?")]}
        assert answer["content"] == "Let me see."
        assert answer["reasoning_content"] == "Hm."
        calls = [(call["id"], call["function"]) for call in answer["tool_calls"]]
        assert calls == [
            ("t1", {"name": "weather", "arguments": {"city": "Köln"}}),
            ("t2", {"name": "search", "arguments": {}}),
        ]
        assert first == {"role": "tool", "content": "Rain", "tool_call_id": "t1"}
        assert second["content"][0]["text"] == "Error:"
        assert last == {"role": "user", "content": "Well?"}
        assert prompt.add_generation_prompt

    async def test_an_answer_that_is_begun_goes_on(self) -> None:
        begun = [*MESSAGES, {"role": "assistant", "content": "The best one is ("}]
        prompt = await prompt_of("{{ messages[-1].content }}", messages=begun)
        assert prompt.continue_final_message
        assert not prompt.add_generation_prompt

    async def test_sampling(self) -> None:
        stub = engine("a")
        await ask(stub, temperature=0.5, top_k=3, top_p=0.9, max_tokens=7, stop_sequences=["x"])
        params = stub.calls[0].params
        assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.9)
        assert (params.max_tokens, params.stop) == (7, ("x",))

    async def test_what_only_others_look_at(self) -> None:
        await ask(
            engine("a"),
            metadata={"user_id": "me"},
            service_tier="auto",
            cache_control={"type": "ephemeral"},
            container=None,
            thinking={"type": "adaptive"},
        )

    @pytest.mark.parametrize("path", [PATH, COUNT])
    async def test_what_is_nested_too_deeply(self, path: str) -> None:
        """Around the depth that can just be read, and not written: no failure of the server's."""
        for depth in (100, *range(440, 500, 4), 5000):
            schema = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
            body: dict[str, Any] = {
                "messages": MESSAGES,
                "tools": [{"name": "f", "input_schema": "SCHEMA"}],
                "tool_choice": {"type": "any"},
            }
            if path == PATH:
                body["max_tokens"] = 5
            given = json.dumps(body).replace('"SCHEMA"', schema)
            response = await client_of(counting("")).post(
                path, data=given, headers={"Content-Type": "application/json"}
            )
            assert response.status_code in ((200,) if depth == 100 else (200, 400))


class TestThinking:
    async def test_a_switch(self) -> None:
        for thinking, switch in (
            ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
            ({"type": "adaptive"}, {"enable_thinking": True}),
            ({"type": "disabled"}, {"enable_thinking": False}),
            (None, {}),
        ):
            prompt = await prompt_of(THINKS, thinking=thinking)
            assert prompt.template_arguments == switch

    async def test_a_model_that_does_not_reason(self) -> None:
        assert (await prompt_of(thinking={"type": "adaptive"})).template_arguments == {}
        message = await refusal(engine("a"), thinking={"type": "enabled", "budget_tokens": 1024})
        assert message.startswith("thinking isn't served")

    async def test_effort(self) -> None:
        template = HERMES + "{{ reasoning_effort }}"
        prompt = await prompt_of(template, output_config={"effort": "low"})
        assert prompt.template_arguments == {"reasoning_effort": "low"}
        message = await refusal(engine("a"), output_config={"effort": "low"})
        assert message.startswith("output_config.effort isn't served")


class TestTools:
    @pytest.mark.parametrize(
        ("choice", "constrained"),
        [
            (None, False),
            ({"type": "auto"}, False),
            ({"type": "auto", "disable_parallel_tool_use": True}, True),
            ({"type": "none"}, False),
            ({"type": "any"}, True),
            ({"type": "tool", "name": "search"}, True),
        ],
    )
    async def test_choices(self, choice: Any, constrained: bool) -> None:
        stub = engine(CALLS)
        await ask(stub, tools=TOOLS, tool_choice=choice)
        grammar = stub.calls[0].params.grammar
        assert (grammar is not None) is constrained
        prompt = stub.calls[0].prompt
        assert isinstance(prompt, ChatPrompt)
        shown = prompt.template_arguments.get("tools", [])
        assert len(shown) == (0 if choice == {"type": "none"} else 2)

    async def test_a_schema_of_the_answer(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        asked = {"type": "json_schema", "schema": schema}
        for body in ({"output_config": {"format": asked}}, {"output_format": asked}):
            stub = engine("{}")
            await ask(stub, **body)
            grammar = stub.calls[0].params.grammar
            assert grammar is not None
            assert '"integer"' in grammar.text


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

    @pytest.mark.parametrize("kind", ["image", "document", "search_result", "redacted_thinking"])
    async def test_blocks_that_are_not_text(self, kind: str) -> None:
        block = {"type": kind, "source": {"type": "url", "url": "http://localhost/x"}}
        message = await refusal(engine("a"), messages=[{"role": "user", "content": [block]}])
        assert message.startswith(f"messages[0].content[0].type: invalid value '{kind}', expected")

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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "stream": stream}
    await check_leaving(PATH, body, first=b'"text":"a"' if stream else None)


class CountingTokenizer(StubTokenizer):
    """One that can encode."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def counting(template: str = "{{ messages[-1].content }}{{ tools }}") -> StubEngine:
    return StubEngine(tokenizer=CountingTokenizer(template or HERMES))


class TestCounting:
    async def test_it_is_the_length_of_the_prompt(self) -> None:
        body = {"messages": MESSAGES, "system": "Be brief."}
        template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
        reply = await post(counting(template), COUNT, **body)
        stub = counting(template)
        whole = await post(stub, PATH, **body, max_tokens=5)
        prompt = "systemBe brief.userHi"
        assert reply == {"input_tokens": len(prompt)}
        usage = whole["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)

    async def test_what_does_not_fit(self) -> None:
        response = await client_of(counting()).post(COUNT, json={"messages": "x"})
        assert response.status_code == 400
        error = await response.get_json()
        assert error["error"]["message"].startswith("messages: ")
        response = await client_of(StubEngine()).post(COUNT, json={"messages": MESSAGES})
        assert "chat template" in (await response.get_json())["error"]["message"]
