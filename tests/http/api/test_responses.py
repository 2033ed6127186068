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
    client_of,
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
    AdapterNotFound,
    ContextTooLong,
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
SHOWS_ALL = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


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


class TestInput:
    async def test_items_become_messages(self) -> None:
        """Join reasoning, text and calls in one message of the assistant's."""
        stub = engine("Yes.", "{{ tools }}{{ messages }}<tool_call>{}<think>")
        call = {"call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
        await respond(
            stub,
            instructions="Be brief.",
            tools=TOOLS,
            input=[
                {"role": "developer", "content": "Be kind."},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "How"},
                    {"type": "input_text", "text": "is it?"},
                ]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                    {"type": "reasoning_text", "text": "I'll look."},
                ]},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                 "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
                {"type": "function_call", "id": "fc_1", "status": "completed", **call},
                {"type": "function_call", **call, "call_id": "c2"},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {"type": "function_call_output", "call_id": "c2",
                 "output": [{"type": "input_text", "text": "rain"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "content": "And yes."},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]},
                {"role": "user", "content": "So?"},
            ],
        )  # fmt: skip
        messages = stub.calls[0].prompt.messages  # type: ignore[union-attr]
        shown = [(message["role"], message["content"]) for message in messages]
        assert shown == [
            ("system", "Be brief."),
            ("system", "Be kind."),
            ("user", [{"type": "text", "text": "How"}, {"type": "text", "text": "is it?"}]),
            ("assistant", "Wait."),
            ("tool", "sun"),
            ("tool", "rain"),
            ("assistant", [{"type": "text", "text": "No."}]),
            ("assistant", "And yes."),
            ("assistant", ""),
            ("user", "So?"),
        ]
        assert messages[3]["reasoning_content"] == "I'll look."
        assert [each["id"] for each in messages[3]["tool_calls"]] == ["c1", "c2"]
        assert messages[3]["tool_calls"][0]["function"]["name"] == "weather"
        assert [message.get("tool_call_id") for message in messages[4:6]] == ["c1", "c2"]
        assert messages[8]["reasoning_content"] == "cut"

    async def test_calls_without_words(self) -> None:
        stub = engine("Yes.")
        call = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c1", "output": "x"}
        await respond(stub, input=[{"role": "user", "content": "Go."}, call, output])
        assistant = stub.calls[0].prompt.messages[1]  # type: ignore[union-attr]
        assert assistant["content"] is None
        assert len(assistant["tool_calls"]) == 1

    async def test_an_output_is_an_input(self) -> None:
        """Accept an output as clients without a memory on the server send it."""
        stub = engine(THOUGHT + CALLS, THINKS)
        first = await respond(stub, input="Hi", tools=TOOLS)
        given = [{"role": "user", "content": "Hi"}, *first["output"]]
        given.append({"type": "function_call_output", "call_id": "x", "output": "7 degrees"})
        await respond(stub, input=given, tools=TOOLS)
        roles = [message["role"] for message in stub.calls[1].prompt.messages]  # type: ignore[union-attr]
        assert roles == ["user", "assistant", "tool"]
        assistant = stub.calls[1].prompt.messages[1]  # type: ignore[union-attr]
        assert assistant["reasoning_content"] == "Hm."
        assert assistant["content"] == "Let me see."
        assert len(assistant["tool_calls"]) == 2

    async def test_a_large_input_without_types(self) -> None:
        """Accept a body of any size without them."""
        stub = engine("Yes.", SHOWS_ALL)
        text = "x" * (2 << 20)
        await respond(stub, input=[{"role": "user", "content": text}])
        assert stub.calls[0].prompt.messages[0]["content"] == text  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"input": []}, "input"),
            ({"input": None}, "input"),
            ({"input": 5}, "input"),
            ({"input": [5]}, "input[0]"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ({"input": [{"type": None, "role": "user", "content": ""}]}, "input[0].type"),
            ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                "input[0].content[0].type",
            ),
            (
                {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
                "input[0].encrypted_content",
            ),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
            ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
            ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
            ({"tools": [{**WEATHER, "async": True}]}, "tools[0].async"),
            ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
            (
                {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}},
                "tool_choice.name",
            ),
            ({"tool_choice": "required"}, "tools"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "x"}}, "prompt"),
            ({"include": ["file_search_call.results"]}, "include[0]"),
            ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
            ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
            ({"text": {"verbosity": "low"}}, "text.verbosity"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
            ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
            ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
            ({"max_tokens": 5}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
            ({"temperature": -1}, "temperature"),
            ({"service_tier": "flex"}, "service_tier"),
            ({"cache_salt": "a", "extra_key": "b"}, "extra_key"),
        ],
    )
    async def test_what_is_refused_is_named(self, body: dict[str, Any], param: str) -> None:
        error = await refused(engine("Hi"), **body)
        assert error["param"] == param
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        ("error", "status", "param"),
        [
            (ContextTooLong("prompt is too long", param="prompt"), 400, "input"),
            (
                InvalidRequest("max_tokens is too large", param="max_tokens"),
                400,
                "max_output_tokens",
            ),
            (InvalidRequest("logprobs is too large", param="logprobs"), 400, "top_logprobs"),
            (AdapterNotFound("no adapter"), 404, "lora_path"),
        ],
    )
    async def test_the_engine_s_refusals_are_in_its_words(
        self, error: Exception, status: int, param: str
    ) -> None:
        async def refuse(_: Any) -> None:
            raise error

        body = {"max_output_tokens": 5, "include": [LOGPROBS]}
        reply = await refused(StubEngine(admit=refuse), status=status, **body)
        assert reply["param"] == param

    async def test_structures_and_tools_are_grammars(self) -> None:
        schema = {"type": "object", "properties": {"a": {"const": 77}}}
        named = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        for body, kind, text in (
            ({"text": {"format": named}}, "json_schema", "77"),
            ({"text": {"format": {"type": "json_object"}}}, "json_schema", "object"),
            ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
            ({"tools": TOOLS, "tool_choice": "required"}, "grammar", "search"),
            (
                {"tools": TOOLS, "tool_choice": {"type": "function", "name": "search"}},
                "grammar",
                "search",
            ),
        ):
            stub = engine("{}")
            await respond(stub, input="Hi", **body)
            grammar = stub.calls[0].params.grammar
            assert grammar is not None
            assert grammar.kind == kind
            assert text in grammar.text
        both = {"text": {"format": named}, "structured_outputs": {"regex": "a+"}}
        assert (
            "text.format and structured_outputs" in (await refused(engine(""), **both))["message"]
        )

    async def test_the_template_is_told_of_effort(self) -> None:
        stub = engine("Yes.", "{{ messages }}{{ reasoning_effort }}")
        reply = await respond(stub, input="Hi", reasoning={"effort": "low", "summary": "auto"})
        assert stub.calls[0].prompt.template_arguments == {"reasoning_effort": "low"}  # type: ignore[union-attr]
        assert reply["reasoning"] == {"effort": "low", "summary": None}

    async def test_no_effort_of_a_model_that_never_reasons(self) -> None:
        stub = engine("Yes.", "{{ messages }}")
        await respond(stub, input="Hi", reasoning={"effort": "none"})
        assert stub.calls[0].prompt.template_arguments == {}  # type: ignore[union-attr]

    async def test_an_id_of_the_client_s(self) -> None:
        reply = await respond(engine("Yes."), input="Hi", request_id="mine")
        assert reply["id"] == "resp_mine"

    @pytest.mark.parametrize("streams", [True, False])
    async def test_what_is_nested_too_deeply(self, streams: bool) -> None:
        """Around the depth that can just be read, and not written: no failure of the server's."""
        tool = {"type": "function", "name": "f", "parameters": "DEEP"}
        said = [{"type": "output_text", "text": "x", "logprobs": "DEEP"}]
        bodies = [
            {"input": "Hi", "tools": [tool], "tool_choice": "none"},
            {"input": [{"role": "assistant", "content": said}]},
            {"input": "Hi", "text": {"format": {"type": "json_schema", "schema": "DEEP"}}},
        ]
        client = client_of(engine("", HERMES))
        for body in bodies:
            for depth in (50, *range(400, 1000, 25), 5000):
                deep = '{"a": ' * depth + "{}" + "}" * depth
                text = json.dumps({**body, "stream": streams}).replace('"DEEP"', deep)
                response = await client.post(
                    RESPONSES, data=text, headers={"Content-Type": "application/json"}
                )
                said_back = await response.get_data(True)
                assert response.status_code in (200, 400), said_back
                assert "response.failed" not in said_back


def test_checked_events_would_see_a_gap() -> None:
    event = {"type": "response.output_text.delta", "sequence_number": 1, "delta": "x"}
    with pytest.raises(AssertionError):
        checked_events(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n")
