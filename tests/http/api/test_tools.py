"""Tool calls over HTTP: from the request's fields to the events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats import (
    CALLS,
    CHAT,
    HERMES,
    MESSAGES,
    SEARCH,
    THINKS,
    TOOLS,
    WEATHER,
    accumulated,
    engine,
    events,
    refusal,
    whole_message,
)
from tests.support.http_stub import client_of, post
from trioserve.text.tool_parsers import FAMILIES


class TestToolCalls:
    async def test_whole(self) -> None:
        reply = await post(engine(CALLS), CHAT, messages=MESSAGES, tools=TOOLS)
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Let me see."
        first, second = message["tool_calls"]
        assert first["type"] == "function"
        assert first["id"] != second["id"]
        assert first["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
        assert second["function"] == {"name": "search", "arguments": "{}"}

    @pytest.mark.parametrize("size", [1, 3, 1000])
    @pytest.mark.parametrize(
        "text", [CALLS, "No call.", CALLS[12:], CALLS[:70], "<think>\nHm.\n</think>\n\n" + CALLS]
    )
    async def test_a_stream_adds_up_to_the_whole(self, text: str, size: int) -> None:
        body = {"messages": MESSAGES, "tools": TOOLS}
        whole = await post(engine(text, THINKS), CHAT, **body)
        chunks = await events(engine(text, THINKS, size=size), **body)
        assert accumulated(chunks) == {0: whole_message(whole["choices"][0])}

    async def test_content_is_null_where_there_are_only_calls(self) -> None:
        reply = await post(engine(CALLS[12:]), CHAT, messages=MESSAGES, tools=TOOLS)
        assert reply["choices"][0]["message"]["content"] is None

    async def test_a_cut_call_ends_by_length(self) -> None:
        stub = engine(CALLS[:70], finish="length")
        reply = await post(stub, CHAT, messages=MESSAGES, tools=TOOLS)
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köl'

    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "search"}}]
    )
    @pytest.mark.parametrize("text", ["<tool_", '<tool_call>\n{"name": "sea'])
    async def test_the_beginning_of_a_call_that_has_to_be_is_no_content(
        self, choice: Any, text: str
    ) -> None:
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
        reply = await post(engine(text, finish="length"), CHAT, **body)
        (told,) = reply["choices"]
        assert told["message"] == {"role": "assistant", "content": "", "refusal": None}
        assert told["finish_reason"] == "length"
        chunks = await events(engine(text, finish="length", size=3), **body)
        assert accumulated(chunks) == {0: whole_message(told)}

    async def test_unknown_functions_are_text(self) -> None:
        reply = await post(engine(CALLS), CHAT, messages=MESSAGES, tools=[SEARCH])
        (choice,) = reply["choices"]
        assert choice["message"]["content"].startswith('Let me see.\n<tool_call>\n{"name": "weat')
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["search"]

    async def test_without_tools_calls_are_text(self) -> None:
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            reply = await post(engine(CALLS), CHAT, messages=MESSAGES, **body)
            (choice,) = reply["choices"]
            assert choice["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
            assert choice["finish_reason"] == "stop"

    async def test_special_tokens_are_seen_if_they_mark_calls(self) -> None:
        """Hide special tokens that mark nothing, unless the client wants to see them."""
        text = '[TOOL_CALLS]search{"q": 1}<unk>'
        tokens = {"[TOOL_CALLS]": 5, "<unk>": 6}
        stub = engine(text, "{{ tools }}[TOOL_CALLS]", tokens=tokens, size=100)
        stub.tokenizer.token_text = {5: "[TOOL_CALLS]", 6: "<unk>"}.__getitem__  # type: ignore[assignment]
        for skip, content in ((None, None), (True, None), (False, "<unk>")):
            reply = await post(stub, CHAT, messages=MESSAGES, tools=TOOLS, skip_special_tokens=skip)
            message = reply["choices"][0]["message"]
            assert message["content"] == content
            assert message["tool_calls"][0]["function"]["arguments"] == '{"q": 1}'
        await post(stub, CHAT, messages=MESSAGES)
        seen = [not call.params.skip_special_tokens for call in stub.calls]
        assert seen == [True, True, True, False]


class TestToolChoice:
    @pytest.mark.parametrize(
        ("choice", "constrained"),
        [
            (None, False),
            ("auto", False),
            ("none", False),
            ("required", True),
            ({"type": "function", "function": {"name": "search"}}, True),
        ],
    )
    async def test_grammars(self, choice: Any, constrained: bool) -> None:
        stub = engine(CALLS)
        await post(stub, CHAT, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        grammar = stub.calls[0].params.grammar
        assert (grammar is not None) is constrained
        if grammar is not None:
            assert grammar.kind == "grammar"
            assert "search" in grammar.text
            assert ("weather" in grammar.text) is (choice == "required")

    async def test_an_empty_schema_is_that_of_no_arguments(self) -> None:
        grammars = []
        for more in ({}, {"parameters": None}, {"parameters": {}}):
            stub = engine(CALLS)
            tools = [{"type": "function", "function": {"name": "search", **more}}]
            await post(stub, CHAT, messages=MESSAGES, tools=tools, tool_choice="required")
            grammar = stub.calls[0].params.grammar
            assert grammar is not None
            grammars.append(grammar.text)
        assert '"additionalProperties": false' in grammars[0]
        assert grammars == grammars[:1] * 3

    async def test_what_else_constrains(self) -> None:
        strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
        allowed = {"mode": "required", "tools": [SEARCH]}
        for body in (
            {"tools": [strict]},
            {"tools": TOOLS, "parallel_tool_calls": False},
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
            },
        ):
            stub = engine(CALLS)
            await post(stub, CHAT, messages=MESSAGES, **body)
            assert stub.calls[0].params.grammar is not None, body

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"tool_choice": "required"}, "tools"),
            (
                {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
                "tool_choice.function.name",
            ),
            ({"tools": [SEARCH, SEARCH]}, "tools[1].function.name"),
            ({"tools": [{"type": "custom", "function": {"name": "x"}}]}, "tools[0].type"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None),
            ({"tools": TOOLS, "tool_choice": "search"}, "tool_choice"),
        ],
    )
    async def test_what_does_not_fit(self, body: dict[str, Any], param: str | None) -> None:
        error = await refusal(engine(CALLS), **body)
        assert error["param"] == (param or "tools[0].function.name")

    async def test_what_is_nested_too_deeply(self) -> None:
        """Around the depth that can just be read, and not written: no failure of the server's."""
        for template in (HERMES, "{{ messages }}"):
            for depth in (100, *range(440, 500, 4), 5000):
                schema = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
                function = {"name": "f", "parameters": "SCHEMA"}
                tools = [{"type": "function", "function": function}]
                body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
                text = json.dumps(body).replace('"SCHEMA"', schema)
                response = await client_of(engine("", template)).post(
                    CHAT, data=text, headers={"Content-Type": "application/json"}
                )
                assert response.status_code in ((200,) if depth == 100 else (200, 400))

    async def test_a_way_to_write_calls_that_is_not_known(self) -> None:
        error = await refusal(engine("", "{{ tools }}<|tool|>"), tools=TOOLS)
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "--tool-call-parser" in error["message"]
        client = client_of(engine(CALLS, "{{ tools }}<|tool|>"), tool_call_parser="hermes")
        reply = await client.post(CHAT, json={"messages": MESSAGES, "tools": TOOLS})
        assert (await reply.get_json())["choices"][0]["finish_reason"] == "tool_calls"
        refused = await client_of(engine(CALLS), tool_call_parser="none").post(
            CHAT, json={"messages": MESSAGES, "tools": TOOLS}
        )
        assert refused.status_code == 400


class TestUnknownFormats:
    TEMPLATE = "{{ tools }}{{ messages }}<tool_call>\n<invoke>NAME</invoke></tool_call>"

    @pytest.mark.parametrize("choice", [None, "auto", "required"])
    async def test_they_are_an_error_that_names_the_choices(self, choice: str | None) -> None:
        stub = engine("x", self.TEMPLATE)
        error = await refusal(stub, tools=TOOLS, tool_choice=choice)
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "--tool-call-parser" in error["message"]
        for family in FAMILIES:
            assert family in error["message"]

    async def test_they_are_served_where_the_parser_is_named_or_no_tool_is_used(self) -> None:
        stub = engine("x", self.TEMPLATE)
        await post(stub, CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="none")
        client = client_of(engine(CALLS, self.TEMPLATE), tool_call_parser="hermes")
        response = await client.post(CHAT, json={"messages": MESSAGES, "tools": TOOLS})
        (choice,) = json.loads(await response.get_data(True))["choices"]
        assert len(choice["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{{ tools }}{{ messages }}<tool_call>\n<function=x><parameter=y>",
            "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "{{ tools }}{{ messages }}<tool_call>{name}<arg_key></arg_key><arg_value>",
            "Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Köln</arg_value>\n</tool_call>",
        ),
    ],
    ids=["qwen3_coder", "glm45"],
)
async def test_calls_in_tags(template: str, text: str, size: int) -> None:
    """They came out as plain text before, because their templates have Hermes' tag, too."""
    stub = engine(text, template, size=size)
    reply = await post(stub, CHAT, messages=MESSAGES, tools=TOOLS)
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    streamed = accumulated(await events(stub, messages=MESSAGES, tools=TOOLS))[0]
    assert streamed["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Köln"}'}]
