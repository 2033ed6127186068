"""``/v1/responses``: from a request's items to a chat, and from the output to items and events."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import trio

from tests.support.asgi_client import ask
from tests.support.chats import CALLS, HERMES, THINKS, engine, said
from tests.support.http_stub import (
    StubEngine,
    StubTokenizer,
    app_of,
    with_logprobs,
    words,
)
from tests.support.responses import (
    RESPONSES,
    accumulated,
    checked_events,
    refused,
    respond,
    stream,
    told,
)
from trioserve.protocol.errors import (
    EngineError,
    InvalidRequest,
    QueueFull,
)
from trioserve.requests.stream import Chunk

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": None,
}
SEARCH = {"type": "function", "name": "search", "parameters": None, "strict": None}
TOOLS = [WEATHER, SEARCH]
THOUGHT = "<think>\nHm.\n</think>\n\n"
LOGPROBS = "message.output_text.logprobs"


class TestWhole:
    async def test_a_text(self) -> None:
        stub = engine("Hello there!")
        reply = await respond(stub, input="Hi", temperature=0.5, max_output_tokens=9)
        assert reply["id"].startswith("resp_")
        assert (reply["status"], reply["object"]) == ("completed", "response")
        assert [told(item) for item in reply["output"]] == [
            ("message", "Hello there!", "completed")
        ]
        assert reply["completed_at"] >= reply["created_at"]
        assert reply["usage"] == {
            "input_tokens": len(stub.calls[0].stream.prompt_token_ids),  # type: ignore[union-attr]
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 12,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply["usage"]["input_tokens"] + 12,
        }
        params = stub.calls[0].params
        assert (params.temperature, params.max_tokens, params.n) == (0.5, 9, 1)
        assert reply["temperature"] == 0.5
        assert reply["max_output_tokens"] == 9
        assert reply["text"]["format"] == {"type": "text"}
        assert reply["model"] == "stub"
        assert stub.calls[0].options["request_id"] == reply["id"]

    async def test_what_the_request_says_comes_back(self) -> None:
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
        choice["tools"][0]["name"] = "search"  # type: ignore[index]
        given = {
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "top_p": 0.5,
            "store": False,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        }
        reply = await respond(engine("{}"), input="Hi", **given)
        for name in ("instructions", "metadata", "tool_choice", "parallel_tool_calls", "top_p"):
            assert reply[name] == given[name]
        assert reply["store"] is False
        assert [tool["name"] for tool in reply["tools"]] == ["weather", "search"]
        assert reply["text"]["format"]["name"] == "x"

    async def test_a_cut_answer_is_incomplete(self) -> None:
        reply = await respond(engine("Hello", finish="length"), input="Hi")
        assert reply["status"] == "incomplete"
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert reply["completed_at"] is None
        assert told(reply["output"][0]) == ("message", "Hello", "incomplete")

    async def test_no_answer_is_an_empty_message(self) -> None:
        reply = await respond(engine(""), input="Hi")
        assert [told(item) for item in reply["output"]] == [("message", "", "completed")]

    async def test_one_that_an_administrator_ends(self) -> None:
        reply = await respond(engine("Hel", finish="abort"), input="Hi")
        assert reply["status"] == "cancelled"
        assert told(reply["output"][0]) == ("message", "Hel", "incomplete")

    async def test_reasoning_is_an_item_of_its_own(self) -> None:
        stub = engine(THOUGHT + "Yes.", THINKS, tokens={"</think>": 1})
        reply = await respond(stub, input="Hi")
        assert [told(item) for item in reply["output"]] == [
            ("reasoning", "Hm.", "completed"),
            ("message", "Yes.", "completed"),
        ]
        assert reply["output"][0]["summary"] == []
        reasoning = reply["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert len(THOUGHT) - 2 <= reasoning <= len(THOUGHT) + 2  # in chunks of four

    async def test_reasoning_that_is_cut_off(self) -> None:
        reply = await respond(engine("<think>Hm, so", THINKS, finish="length"), input="Hi")
        assert [told(item) for item in reply["output"]] == [("reasoning", "Hm, so", "incomplete")]
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 13

    async def test_calls(self) -> None:
        reply = await respond(engine(CALLS), input="Hi", tools=TOOLS)
        message, first, second = reply["output"]
        assert told(message) == ("message", "Let me see.", "completed")
        assert told(first) == ("call", "weather", '{"city": "Köln"}', "completed")
        assert told(second) == ("call", "search", "{}", "completed")
        assert first["call_id"] != second["call_id"]
        assert first["id"].startswith("fc_")

    async def test_only_calls(self) -> None:
        reply = await respond(engine(CALLS[12:]), input="Hi", tools=TOOLS)
        assert [item["type"] for item in reply["output"]] == ["function_call"] * 2


class TestStreams:
    async def test_the_whole_sequence(self) -> None:
        events = await stream(engine("Hello!", size=3), input="Hi")
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *("output_text.delta", "output_text.delta", "output_text.done"),
            *("content_part.done", "output_item.done", "completed"),
        ]
        created, completed = events[0]["response"], events[-1]["response"]
        assert (created["status"], created["output"]) == ("in_progress", [])
        assert created["usage"] is None
        assert completed["status"] == "completed"
        assert completed["usage"]["output_tokens"] == 6
        assert completed["id"] == created["id"]
        item = completed["output"][0]
        assert {event.get("item_id", item["id"]) for event in events} == {item["id"]}
        assert events[-2]["item"] == item
        assert events[-3]["part"] == item["content"][0]

    @pytest.mark.parametrize("size", [1, 3, 1000])
    @pytest.mark.parametrize(
        "text",
        [
            CALLS,
            "No call.",
            CALLS[12:],
            CALLS[:70],
            THOUGHT + CALLS,
            THOUGHT + "Well.",
            "<think>Hm",
            "",
            'Quotes " and \\u0000, 0 and\nKöln',
        ],
    )
    @pytest.mark.parametrize("template", [HERMES, THINKS])
    async def test_a_stream_adds_up_to_the_whole(self, text: str, size: int, template: str) -> None:
        body = {"input": "Hi", "tools": TOOLS}
        whole = await respond(engine(text, template), **body)
        events = await stream(engine(text, template, size=size), **body)
        last = events[-1]["response"]
        assert [told(item) for item in last["output"]] == [told(item) for item in whole["output"]]
        assert accumulated(events) == [told(item) for item in whole["output"]]
        ids = [item["id"] for item in last["output"]]
        assert len(set(ids)) == len(ids)
        assert last["usage"] == whole["usage"] or template == THINKS

    async def test_a_plain_text_comes_piece_by_piece(self) -> None:
        """Encode its events before their text is there."""
        text = 'Of "0" and \\ "sequence_number":0, and \x00.'
        events = await stream(engine(text, None, size=1), input="Hi")
        deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
        assert deltas == list(text)
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == text

    async def test_events_of_calls(self) -> None:
        events = await stream(engine(CALLS[12:]), input="Hi", tools=TOOLS)
        done = [event for event in events if event["type"].endswith("arguments.done")]
        assert [event["name"] for event in done] == ["weather", "search"]
        assert done[0]["arguments"] == '{"city": "Köln"}'

    async def test_events_of_reasoning(self) -> None:
        events = await stream(engine(THOUGHT + "Yes.", THINKS), input="Hi")
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
        parts = [event["part"]["type"] for event in events if "part" in event]
        assert parts == ["reasoning_text"] * 2 + ["output_text"] * 2

    async def test_a_cut_stream(self) -> None:
        events = await stream(engine("Hello", finish="length"), input="Hi")
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"]["reason"] == "max_output_tokens"

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (EngineError("out of luck"), "server_error", "out of luck"),
            (RuntimeError("a secret"), "server_error", "the server failed on this request"),
            (QueueFull("no room"), "rate_limit_exceeded", "no room"),
            (InvalidRequest("too much"), "invalid_prompt", "too much"),
        ],
    )
    async def test_what_fails_halfway(self, error: Exception, code: str, message: str) -> None:
        stub = StubEngine(script=lambda _: [*said("Hello there")[:-1], error])
        events = await stream(stub, input="Hi")
        assert events[-1]["type"] == "response.failed"
        response = events[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"]["code"] == code
        assert response["error"]["message"] == message

    async def test_an_input_without_messages_is_named(self) -> None:
        async def refuse(_: Any) -> None:
            raise InvalidRequest("messages must have at least one message", param="messages")

        error = await refused(StubEngine(admit=refuse), input=[{"type": "reasoning"}])
        assert error["param"] == "input"
        assert error["message"] == "input must have at least one message"

    async def test_what_is_refused_is_no_stream(self) -> None:
        async def refuse(_: Any) -> None:
            raise QueueFull("the queue is full")

        error = await refused(StubEngine(admit=refuse), status=429, stream=True)
        assert error["code"] == "queue_full"

    async def test_a_client_that_leaves_ends_it(self) -> None:
        stub = StubEngine(script=lambda _: [*said("Hello")[:-1], math.inf])
        app = app_of(stub)
        async with trio.open_nursery() as nursery:
            for streams in (True, False):
                nursery.start_soon(ask, app, RESPONSES, {"input": "Hi", "stream": streams})
            while len(stub.calls) < 2:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        with trio.fail_after(20):
            for call in stub.calls:
                await call.left.wait()
        response = await app.test_client().get(f"{RESPONSES}/{stub.calls[0].options['request_id']}")
        assert response.status_code == 404


class TestLogprobs:
    async def test_of_a_text(self) -> None:
        chunks = [with_logprobs(chunk, 2) for chunk in words("Hi there ?")]  # type: ignore[arg-type]
        stub = StubEngine(script=lambda _: list(chunks))
        body = {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 2}
        reply = await respond(stub, **body)
        assert stub.calls[0].params.logprobs == 2
        entries = reply["output"][0]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries) == "Hi there ?"
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 10
        events = await stream(StubEngine(script=lambda _: list(chunks)), **body)
        deltas = [event for event in events if event["type"].endswith("text.delta")]
        assert [len(event["logprobs"]) for event in deltas] == [3, 6, 1]
        (done,) = [event for event in events if event["type"].endswith("text.done")]
        assert done["logprobs"] == entries
        assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries

    async def test_those_of_reasoning_and_calls_are_not_told(self) -> None:
        text = f"<think>Hm.</think>{CALLS}"
        chunks = [with_logprobs(Chunk(letter, (ord(letter),)), 0) for letter in text]
        tokenizer = StubTokenizer(THINKS)
        stub = StubEngine(
            script=lambda _: [*chunks, Chunk("", finish_reason="stop")], tokenizer=tokenizer
        )
        reply = await respond(stub, input="Hi", tools=TOOLS, include=[LOGPROBS])
        message = next(item for item in reply["output"] if item["type"] == "message")
        entries = message["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries).strip() == "Let me see."

    async def test_reasoning_ends_within_a_chunk(self) -> None:
        """Tokens up to the closing mark are reasoning's, whatever came along with it."""
        ids = (*map(ord, "<think>Hm."), 1, *map(ord, "Yes"))
        chunk = with_logprobs(Chunk("<think>Hm.</think>Yes", ids, finish_reason="stop"), 0)
        tokenizer = StubTokenizer(THINKS, {"</think>": 1})
        stub = StubEngine(script=lambda _: [chunk], tokenizer=tokenizer)
        reply = await respond(stub, input="Hi", include=[LOGPROBS])
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 11
        entries = reply["output"][1]["content"][0]["logprobs"]
        assert [entry["token"] for entry in entries] == ["Y", "e", "s"]

    async def test_without_them(self) -> None:
        stub = engine("Hi")
        await respond(stub, input="Hi", include=["reasoning.encrypted_content"])
        assert stub.calls[0].params.logprobs is None
        error = await refused(engine("Hi"), top_logprobs=2)
        assert error["param"] == "top_logprobs"


def test_checked_events_would_see_a_gap() -> None:
    event = {"type": "response.output_text.delta", "sequence_number": 1, "delta": "x"}
    with pytest.raises(AssertionError):
        checked_events(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n")
