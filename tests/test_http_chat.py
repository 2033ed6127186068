"""Chats: tools, reasoning and several answers, from the request's fields to the events."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from http_stub import (
    Step,
    StubEngine,
    StubTokenizer,
    client_of,
    http_client,
    post,
    served,
    with_logprobs,
)

from trioserve.request import ChatPrompt
from trioserve.stream import Chunk

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SEARCH = {"type": "function", "function": {"name": "search"}}
TOOLS = [WEATHER, SEARCH]
HERMES = "{{ tools }}{{ messages }}<tool_call>"
THINKS = "{{ tools }}{{ messages }}{% if enable_thinking %}<tool_call><think>{% endif %}"
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>{"name": "search"}</tool_call>'
)


def encode_deep(body: Any) -> bytes:
    """JSON of what is nested more deeply than Python likes."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * limit)
    try:
        return json.dumps(body).encode()
    finally:
        sys.setrecursionlimit(limit)


def said(text: str, *, size: int = 4, finish: str = "stop", index: int = 0) -> list[Step]:
    """``text`` in chunks of ``size`` characters, the last of them final."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    chunks: list[Step] = [Chunk(piece, tuple(map(ord, piece)), index) for piece in pieces]
    return [*chunks, Chunk("", (), index, finish_reason=finish)]


def engine(text: str, template: str | None = HERMES, **options: Any) -> StubEngine:
    tokens = options.pop("tokens", None)
    return StubEngine(
        script=lambda _: said(text, **options), tokenizer=StubTokenizer(template, tokens)
    )


async def events(stub: StubEngine, **body: Any) -> list[Any]:
    """The data of a stream's events, by a real server: the test client has no room for many."""
    async with served(stub) as url, http_client(url) as client:
        response = await client.post(CHAT, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def refusal(stub: StubEngine, **body: Any) -> Any:
    response = await client_of(stub).post(CHAT, json={"messages": MESSAGES, **body})
    assert response.status_code == 400, await response.get_data(True)
    return json.loads(await response.get_data(True))["error"]


def accumulated(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client puts together of a stream, by the index of the choice."""
    messages: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = messages.setdefault(choice["index"], {"finish_reason": None})
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
            delta = choice["delta"]
            for name in ("role", "content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    assert (part["type"], part["id"][:5]) == ("function", "call_")
                    calls.append({"name": part["function"]["name"], "arguments": ""})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return messages


def whole_message(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice as :func:`accumulated` has it."""
    message = choice["message"]
    found = {"finish_reason": choice["finish_reason"], "role": message["role"]}
    found["content"] = message["content"] or ""
    found |= {name: message[name] for name in ("reasoning", "reasoning_content") if name in message}
    if "tool_calls" in message:
        found["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return found


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
        """Those that mark nothing stay hidden, unless the client wants to see them."""
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
            statuses = set()
            for depth in range(440, 500, 2):
                schema: dict[str, Any] = {"type": "object"}
                for _ in range(depth):
                    schema = {"type": "object", "properties": {"a": schema}}
                function = {"name": "f", "parameters": schema}
                tools = [{"type": "function", "function": function}]
                body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
                text = encode_deep(body)
                response = await client_of(engine("", template)).post(
                    CHAT, data=text, headers={"Content-Type": "application/json"}
                )
                statuses.add(response.status_code)
            assert statuses == {200, 400}

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


class TestPrompts:
    async def _prompt(self, template: str | None, **body: Any) -> ChatPrompt:
        stub = engine("Hello", template)
        await post(stub, CHAT, **{"messages": MESSAGES, **body})
        prompt = stub.calls[0].prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt

    async def test_tools_as_the_template_prints_them(self) -> None:
        prompt = await self._prompt(HERMES, tools=TOOLS)
        assert prompt.template_arguments == {"tools": TOOLS}
        assert json.dumps(prompt.template_arguments["tools"][0]) == json.dumps(WEATHER)
        assert (
            await self._prompt(HERMES, tools=TOOLS, tool_choice="none")
        ).template_arguments == {}

    async def test_reasoning_has_both_of_its_names(self) -> None:
        message = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
        prompt = await self._prompt(HERMES, messages=[*MESSAGES, message])
        assert prompt.messages[1] == {**message, "reasoning_content": "Hm."}

    async def test_an_answer_can_be_sent_back_as_it_came(self) -> None:
        reply = await post(engine(CALLS, THINKS), CHAT, messages=MESSAGES, tools=TOOLS)
        message = reply["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sun"}
        prompt = await self._prompt(HERMES, messages=[*MESSAGES, message, result], tools=TOOLS)
        assert prompt.messages[2] == result
        assert prompt.messages[1]["tool_calls"] == message["tool_calls"]

    async def test_a_template_without_tools(self) -> None:
        """The system message describes them, and results are what the user says."""
        function = {"name": "weather", "arguments": '{"city": "Köln"}'}
        call = {"id": "1", "type": "function", "function": function}
        bare = {**call, "function": {"name": "search"}}
        messages = [
            {"role": "system", "content": "Be brief."},
            *MESSAGES,
            {"role": "assistant", "content": "Well.", "tool_calls": [call, bare]},
            {"role": "tool", "tool_call_id": "1", "content": "Sun"},
            {"role": "tool", "tool_call_id": "2", "content": "Rain"},
        ]
        prompt = await self._prompt("{{ messages }}", messages=messages, tools=TOOLS)
        assert prompt.template_arguments == {}
        system, user, assistant, results = prompt.messages
        assert system["content"].startswith("Be brief.\n\nYou can call functions.")
        assert json.dumps(WEATHER["function"]) in system["content"]
        assert '{"name": "NAME", "arguments": ARGUMENTS}' in system["content"]
        assert "answer in plain words" in system["content"]
        assert user == MESSAGES[0]
        assert "tool_calls" not in assistant
        assert assistant["content"] == (
            'Well.\n[{"name": "weather", "arguments": {"city": "Köln"}}, '
            '{"name": "search", "arguments": {}}]'
        )
        assert results == {
            "role": "user",
            "content": "The function search returned:\nSun\n\nThe function returned:\nRain",
        }
        prompt = await self._prompt("{{ messages }}", tools=TOOLS, tool_choice="required")
        assert [message["role"] for message in prompt.messages] == ["system", "user"]
        assert "have to call" in prompt.messages[0]["content"]

    async def test_calls_as_json(self) -> None:
        text = '{"name": "weather", "arguments": {"city": "Köln"}}'
        reply = await post(engine(text, "{{ messages }}"), CHAT, messages=MESSAGES, tools=TOOLS)
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"

    async def test_arguments_of_the_template(self) -> None:
        template = "{{ messages }}{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}"
        fields = {"documents": [{"text": "x"}], "reasoning_effort": "low"}
        kwargs = {"enable_thinking": False}
        prompt = await self._prompt(template, **fields, chat_template_kwargs=kwargs)
        assert prompt.template_arguments == {**fields, **kwargs}
        for name, value in fields.items():
            error = await refusal(engine("", "{{ messages }}"), **{name: value})
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        error = await refusal(engine("", "{{ messages }}"), chat_template_kwargs=kwargs)
        assert error["param"] == "chat_template_kwargs.enable_thinking"
        error = await refusal(engine("", HERMES), chat_template_kwargs={"tools": []})
        assert error["param"] == "chat_template_kwargs.tools"
        error = await refusal(engine("", HERMES), chat_template="{{ 1 }}")
        assert error["param"] == "chat_template"
        assert "executed" in error["message"]

    async def test_developers_and_refusals(self) -> None:
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            *MESSAGES,
        ]
        prompt = await self._prompt("{{ messages }}", messages=messages)
        assert prompt.messages[0]["role"] == "system"
        assert prompt.messages[1]["content"] == [{"type": "text", "text": "No."}]
        prompt = await self._prompt("{{ messages }}developer", messages=messages)
        assert prompt.messages[0]["role"] == "developer"


class TestReasoning:
    TEXT = "<think>\nHm.\n</think>\n\nParis."

    async def test_apart(self) -> None:
        for stream in (False, True):
            if stream:
                chunks = await events(engine(self.TEXT, THINKS), messages=MESSAGES)
                message = accumulated(chunks)[0]
            else:
                reply = await post(engine(self.TEXT, THINKS), CHAT, messages=MESSAGES)
                message = reply["choices"][0]["message"]
            assert message["reasoning"] == message["reasoning_content"] == "Hm."
            assert message["content"] == "Paris."

    async def test_cut_off(self) -> None:
        reply = await post(engine("<think>Hm", THINKS, finish="length"), CHAT, messages=MESSAGES)
        (choice,) = reply["choices"]
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning"] == "Hm"
        assert choice["finish_reason"] == "length"

    async def test_left_out_or_left_in(self) -> None:
        reply = await post(
            engine(self.TEXT, THINKS), CHAT, messages=MESSAGES, include_reasoning=False
        )
        assert "reasoning" not in reply["choices"][0]["message"]
        assert reply["choices"][0]["message"]["content"] == "Paris."
        reply = await post(
            engine(self.TEXT, THINKS), CHAT, messages=MESSAGES, separate_reasoning=False
        )
        assert reply["choices"][0]["message"]["content"] == self.TEXT
        client = client_of(engine(self.TEXT, THINKS), reasoning_parser="none")
        response = await client.post(CHAT, json={"messages": MESSAGES})
        assert (await response.get_json())["choices"][0]["message"]["content"] == self.TEXT
        client = client_of(engine(self.TEXT, "{{ messages }}"), reasoning_parser="think")
        response = await client.post(CHAT, json={"messages": MESSAGES})
        assert (await response.get_json())["choices"][0]["message"]["content"] == "Paris."

    async def test_a_prompt_that_begins_it(self) -> None:
        template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
        stub = engine("Hm.\n</think>Paris.", template)
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
        for body in ({}, {"response_format": schema}):
            reply = await post(stub, CHAT, messages=MESSAGES, **body)
            assert reply["choices"][0]["message"]["reasoning"] == "Hm."
            assert reply["choices"][0]["message"]["content"] == "Paris."
        grammar = stub.calls[1].params.grammar
        assert grammar is not None
        assert "start: head GAP? answer" in grammar.text
        final = [*MESSAGES, {"role": "assistant", "content": "<think>So"}]
        body = {"messages": final, "continue_final_message": True}
        reply = await post(engine(" it is.</think>Yes", THINKS), CHAT, **body)
        assert reply["choices"][0]["message"]["reasoning"] == "it is."

    async def test_formats_come_after_it(self) -> None:
        body = {"messages": MESSAGES, "regex": "a+"}
        stub = engine("a", THINKS)
        await post(stub, CHAT, **body)
        grammar = stub.calls[0].params.grammar
        assert grammar is not None
        assert grammar.kind == "grammar"
        assert '"</think>"' in grammar.text
        assert "/a+/" in grammar.text
        stub = engine("a", HERMES)
        await post(stub, CHAT, **body)
        grammar = stub.calls[0].params.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.text) == ("regex", "a+")


class TestSeveralAnswers:
    def _engine(self) -> StubEngine:
        def script(call: Any) -> list[Step]:
            answers = [said(text, index=i) for i, text in enumerate([CALLS, "No.", "Yes, it is."])]
            longest = max(map(len, answers))
            return [
                answer[step] for step in range(longest) for answer in answers if step < len(answer)
            ]

        return StubEngine(script=script, tokenizer=StubTokenizer(HERMES))

    async def test_each_has_its_index(self) -> None:
        body = {"messages": MESSAGES, "n": 3, "tools": TOOLS}
        whole = await post(self._engine(), CHAT, **body)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        reasons = [choice["finish_reason"] for choice in whole["choices"]]
        assert reasons == ["tool_calls", "stop", "stop"]
        chunks = await events(self._engine(), **body)
        expected = {choice["index"]: whole_message(choice) for choice in whole["choices"]}
        assert accumulated(chunks) == expected
        roles = [chunk["choices"][0]["index"] for chunk in chunks[:3]]
        assert roles == [0, 1, 2]


class TestWhatElseIsTold:
    async def test_ids_and_the_prompt(self) -> None:
        body = {"messages": MESSAGES, "return_token_ids": True, "return_prompt_text": True}
        reply = await post(engine("Yes", None, size=2), CHAT, **body)
        assert reply["prompt_token_ids"] == [0]
        assert reply["prompt_text"] == "\0"
        assert reply["choices"][0]["token_ids"] == [ord(character) for character in "Yes"]
        first, *rest = await events(engine("Yes", None, size=2), **body)
        assert (first["prompt_token_ids"], first["prompt_text"]) == ([0], "\0")
        assert all("prompt_token_ids" not in chunk for chunk in rest)
        ids = [id for chunk in rest for id in chunk["choices"][0]["token_ids"]]
        assert ids == reply["choices"][0]["token_ids"]

    async def test_nothing_of_it_unless_asked_for(self) -> None:
        reply = await post(engine("Yes", None), CHAT, messages=MESSAGES)
        assert set(reply) == {"id", "object", "created", "model", "choices", "usage"}
        assert "token_ids" not in reply["choices"][0]

    async def test_logprobs_are_those_of_all_tokens(self) -> None:
        """Of reasoning and calls too, as they came, and in an event even where there is no text."""
        text = f"<think>Hm.</think>{CALLS}"
        stub = StubEngine(
            script=lambda call: [
                with_logprobs(step, call.params.logprobs or 0) if isinstance(step, Chunk) else step
                for step in said(text, size=1)
            ],
            tokenizer=StubTokenizer(THINKS),
        )
        body = {"messages": MESSAGES, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
        reply = await post(stub, CHAT, **body)
        content = reply["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == text
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)
        chunks = await events(stub, **body)
        streamed = [
            entry
            for chunk in chunks
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content
        reply = await post(stub, CHAT, **body, return_tokens_as_token_ids=True)
        first = reply["choices"][0]["logprobs"]["content"][0]
        assert first["token"] == "token_id:60"
        assert first["top_logprobs"][0]["token"] == "token_id:60"

    async def test_echo(self) -> None:
        messages = [*MESSAGES, {"role": "assistant", "content": "It is "}]
        body = {"messages": messages, "echo": True, "continue_final_message": True}
        reply = await post(engine("Paris."), CHAT, **body)
        assert reply["choices"][0]["message"]["content"] == "It is Paris."
        assert accumulated(await events(engine("Paris."), **body))[0]["content"] == ("It is Paris.")
        reply = await post(engine("Paris."), CHAT, messages=MESSAGES, echo=True)
        assert reply["choices"][0]["message"]["content"] == "Paris."
        body = {"messages": MESSAGES, "echo": True, "add_generation_prompt": False}
        reply = await post(engine(" there"), CHAT, **body)
        assert reply["choices"][0]["message"]["content"] == "Hi there"
        assert reply["choices"][0]["message"]["role"] == "user"

    async def test_prompt_logprobs(self) -> None:
        stub = engine("Yes")
        await post(stub, CHAT, messages=MESSAGES, prompt_logprobs=2)
        assert stub.calls[0].params.prompt_logprobs == 2
        error = await refusal(stub, prompt_logprobs=1, stream=True)
        assert error["param"] == "prompt_logprobs"

    async def test_usage_in_every_event(self) -> None:
        options = {"continuous_usage_stats": True, "include_usage": True}
        chunks = await events(engine("Yes"), messages=MESSAGES, stream_options=options)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 3, 3, 3]
