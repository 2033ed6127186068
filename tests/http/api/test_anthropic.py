"""Anthropic's ``/v1/messages``: what its fields become, and what its answers and events are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats import CALLS, HERMES, MESSAGES, THINKS, engine
from tests.support.http_stub import (
    StubEngine,
    StubTokenizer,
    check_leaving,
    client_of,
    http_client,
    post,
    served,
    words,
)
from trioserve.requests.prompts import ChatPrompt

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
