"""Chats over HTTP: prompts, reasoning, several answers, and what else is told of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.support.chats import (
    CALLS,
    CHAT,
    HERMES,
    MESSAGES,
    THINKS,
    TOOLS,
    WEATHER,
    accumulated,
    engine,
    events,
    refusal,
    said,
    whole_message,
)
from tests.support.http_stub import Step, StubEngine, StubTokenizer, post, with_logprobs
from trioserve.http.api.openai.writer import usage_reply
from trioserve.requests.generation import Usage
from trioserve.requests.prompts import ChatPrompt
from trioserve.requests.stream import Chunk, TokenLogprob


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
        differing = {**message, "reasoning_content": "By its older name."}
        prompt = await self._prompt(HERMES, messages=[*MESSAGES, differing])
        assert prompt.messages[1] == {**message, "reasoning_content": "Hm."}

    async def test_an_answer_can_be_sent_back_as_it_came(self) -> None:
        reply = await post(engine(CALLS, THINKS), CHAT, messages=MESSAGES, tools=TOOLS)
        message = reply["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sun"}
        prompt = await self._prompt(HERMES, messages=[*MESSAGES, message, result], tools=TOOLS)
        assert prompt.messages[2] == result
        assert prompt.messages[1]["tool_calls"] == message["tool_calls"]

    async def test_a_template_without_tools(self) -> None:
        """Describe tools in the system message, and results in the user's."""
        function = {"name": "weather", "arguments": '{"city": "Köln"}'}
        call = {"id": "1", "type": "function", "function": function}
        bare = {**call, "function": {"name": "search"}}
        messages = [
            {"role": "system", "content": "Be brief."},
            *MESSAGES,
            {"role": "assistant", "content": "Well.", "tool_calls": [call, bare]},
            {"role": "tool", "tool_call_id": "1", "content": "Sun"},
            {"role": "tool", "tool_call_id": "2", "content": "Rain"},
            {"role": "user", "content": "So?"},
            {"role": "tool", "tool_call_id": "2", "content": "Fog"},
        ]
        prompt = await self._prompt("{{ messages }}", messages=messages, tools=TOOLS)
        assert prompt.template_arguments == {}
        system, user, assistant, results, *rest = prompt.messages
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
        assert rest == [
            {"role": "user", "content": "So?"},
            {"role": "user", "content": "The function returned:\nFog"},
        ]
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
        wanted = {"enable_thinking": True}
        error = await refusal(engine("", "{{ messages }}"), chat_template_kwargs=wanted)
        assert error["param"] == "chat_template_kwargs.enable_thinking"
        error = await refusal(engine("", HERMES), chat_template_kwargs={"tools": []})
        assert error["param"] == "chat_template_kwargs.tools"
        error = await refusal(engine("", HERMES), chat_template="{{ 1 }}")
        assert error["param"] == "chat_template"
        assert "executed" in error["message"]

    @pytest.mark.parametrize(
        "fields",
        [
            {"reasoning_effort": "none"},
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"thinking": False}},
        ],
    )
    async def test_no_reasoning(self, fields: dict[str, Any]) -> None:
        """Refuse to switch reasoning off without need or without a way."""
        prompt = await self._prompt("{{ messages }}", **fields)
        assert prompt.template_arguments == {}
        error = await refusal(engine("", "{{ messages }}<think>"), **fields)
        (name,) = fields
        assert error["param"].startswith(name)
        assert error["code"] == "unsupported_parameter"

    async def test_no_effort_turns_a_switch_off(self) -> None:
        off = {"enable_thinking": False}
        thinks = "{{ messages }}{{ enable_thinking }}<think>"
        prompt = await self._prompt(thinks, reasoning_effort="none")
        assert prompt.template_arguments == off
        prompt = await self._prompt(thinks, enable_thinking=False)
        assert prompt.template_arguments == off
        both = thinks + "{{ reasoning_effort }}"
        prompt = await self._prompt(both, reasoning_effort="none")
        assert prompt.template_arguments == {"reasoning_effort": "none", **off}
        error = await refusal(engine("", thinks), enable_thinking=True, chat_template_kwargs=off)
        assert error["param"] == "enable_thinking"
        error = await refusal(engine("", "{{ messages }}"), enable_thinking=True)
        assert error["param"] == "enable_thinking"

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

    async def test_an_answer_that_comes_back_with_notes_of_the_client(self) -> None:
        said = {"role": "assistant", "content": "No."}
        noted = {**said, "provider_specific_fields": {"refusal": None}}
        prompt = await self._prompt("{{ messages }}", messages=[noted, *MESSAGES])
        assert prompt.messages[0] == said


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
        absent = {"prompt_logprobs", "prompt_token_ids"}
        assert set(reply) == {"id", "object", "created", "model", "choices", "usage", *absent}
        assert {reply[name] for name in absent} == {None}
        assert "token_ids" not in reply["choices"][0]

    async def test_logprobs_are_those_of_all_tokens(self) -> None:
        """Return log-probabilities of reasoning and calls too, also in an event without text."""
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

    async def test_asked_tokens_in_place_of_the_most_probable_ones(self) -> None:
        """vLLM's meaning: the token itself, and those of ``logprob_token_ids``."""
        entry = TokenLogprob(97, -0.5, "a", ((98, -0.1, "b"),), ((99, -3.0, "c"), (97, -0.5, "a")))
        stub = StubEngine(
            script=lambda _: [Chunk("a", (97,), finish_reason="stop", logprobs=(entry,))],
            tokenizer=StubTokenizer(THINKS),
        )
        fields = {"logprobs": True, "top_logprobs": 4, "logprob_token_ids": [99, 97]}
        reply = await post(stub, CHAT, messages=MESSAGES, **fields)
        (told,) = reply["choices"][0]["logprobs"]["content"]
        assert [(each["token"], each["logprob"]) for each in told["top_logprobs"]] == [
            ("a", -0.5),
            ("c", -3.0),
        ]
        assert stub.calls[0].params.logprobs == 0

    @pytest.mark.parametrize(
        ("chunk", "matched"),
        [
            (Chunk("a", (97, 7), finish_reason="stop"), 7),
            (Chunk("a", (97,), finish_reason="stop", stop_reason="END"), "END"),
            (Chunk("a", (97, 5), finish_reason="stop", stop_reason=5), 5),
            (Chunk("a", (97, 7), finish_reason="length"), None),
        ],
    )
    async def test_what_matched(self, chunk: Chunk, matched: int | str | None) -> None:
        stub = StubEngine(script=lambda _: [chunk], tokenizer=StubTokenizer(HERMES))
        stub.eos_token_ids = (7,)
        reply = await post(stub, CHAT, messages=MESSAGES)
        assert reply["choices"][0]["matched_stop"] == matched
        assert (await events(stub, messages=MESSAGES))[-1]["choices"][0]["matched_stop"] == matched
        reply = await post(stub, "/v1/completions", prompt="x")
        assert reply["choices"][0]["matched_stop"] == matched

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


class TestDrafts:
    @pytest.mark.parametrize(
        ("content", "text"),
        [("abc", "abc"), ([{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}], "abc")],
    )
    async def test_a_prediction_is_handed_on(self, content: Any, text: str) -> None:
        stub = engine("Hello")
        prediction = {"type": "content", "content": content}
        await post(stub, CHAT, messages=MESSAGES, prediction=prediction, speculative=False)
        assert stub.calls[0].params.prediction == text
        assert stub.calls[0].params.speculative is False

    @pytest.mark.parametrize(
        ("prediction", "field"),
        [
            ("abc", "prediction"),
            ({"type": "tokens", "content": "abc"}, "prediction.type"),
            ({"type": "content", "content": 7}, "prediction.content"),
            ({"type": "content"}, "prediction.content"),
        ],
    )
    async def test_what_is_no_prediction_is_refused(self, prediction: Any, field: str) -> None:
        error = await refusal(engine("Hello"), prediction=prediction)
        assert error["param"] == field

    def test_usage_has_what_became_of_drafts(self) -> None:
        reply = usage_reply(Usage(5, 6, 0, draft_tokens=7, accepted_draft_tokens=3))
        assert msgspec.to_builtins(reply.completion_tokens_details) == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 4,
        }
        assert usage_reply(Usage(5, 6, 0)).completion_tokens_details is msgspec.UNSET
