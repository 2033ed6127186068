"""The input of responses: items, roles, tools and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.api.test_responses import LOGPROBS, THOUGHT, TOOLS, WEATHER
from tests.support.chats import CALLS, HERMES, THINKS, engine
from tests.support.http_stub import (
    StubEngine,
    client_of,
)
from tests.support.responses import (
    RESPONSES,
    refused,
    respond,
)
from trioserve.protocol.errors import (
    AdapterNotFound,
    ContextTooLong,
    InvalidRequest,
)

SHOWS_ALL = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


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
                "input[0].content[0].image_url",
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
