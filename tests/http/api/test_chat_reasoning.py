"""Chat completions of models that reason before they answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chats import (
    CHAT,
    HERMES,
    MESSAGES,
    THINKS,
    accumulated,
    engine,
    events,
)
from tests.support.http_stub import Step, StubEngine, StubTokenizer, client_of, post
from trioserve.requests.stream import Chunk, TokenLogprob


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

    @pytest.mark.parametrize(
        ("pieces", "expected"),
        [
            ([("<think>", (1,)), ("Hm.", (2, 3)), ("</think>", (4,)), ("Yes", (5, 6))], 4),
            ([("<think></think>", (1, 4)), ("Yes", (5,))], 2),
            ([("<think>Hm", (1, 2))], 2),
            ([("Yes", (5,))], 0),
        ],
        ids=["reasoned", "empty", "cut off", "none"],
    )
    async def test_its_tokens_are_counted(
        self, pieces: list[tuple[str, tuple[int, ...]]], expected: int
    ) -> None:
        def script(_: Any) -> list[Step]:
            return [*(Chunk(*piece) for piece in pieces), Chunk("", (), finish_reason="stop")]

        def stub(template: str) -> StubEngine:
            tokens = {"</think>": 4}
            return StubEngine(script=script, tokenizer=StubTokenizer(template, tokens))

        usage = {"include_usage": True}
        for include in (True, False):
            body = {"messages": MESSAGES, "include_reasoning": include}
            reply = await post(stub(THINKS), CHAT, **body)
            drafts = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
            details = {"reasoning_tokens": expected, **drafts}
            assert reply["usage"]["completion_tokens_details"] == details
            *_, last = await events(stub(THINKS), stream_options=usage, **body)
            assert last["usage"]["completion_tokens_details"] == details
        for never, body in ((THINKS, {"separate_reasoning": False}), ("{{ messages }}", {})):
            reply = await post(stub(never), CHAT, messages=MESSAGES, **body)
            assert "completion_tokens_details" not in reply["usage"]

    async def test_what_is_left_out_is_told_by_its_tokens_neither(self) -> None:
        pieces = [("<think>", 1), ("Hm", 2), ("</think>", 4), ("Yes", 5), (".", 6)]

        def script(_: Any) -> list[Step]:
            given = [
                Chunk(text, (id,), logprobs=(TokenLogprob(id, -0.5, text),)) for text, id in pieces
            ]
            return [*given, Chunk("", (), finish_reason="stop")]

        body = {"messages": MESSAGES, "logprobs": True, "return_token_ids": True}
        for include, expected in ((True, [1, 2, 4, 5, 6]), (False, [5, 6])):
            body["include_reasoning"] = include
            tokenizer = StubTokenizer(THINKS, {"</think>": 4})
            reply = await post(StubEngine(script=script, tokenizer=tokenizer), CHAT, **body)
            (choice,) = reply["choices"]
            assert choice["token_ids"] == expected
            names = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert names == [chr(id) for id in expected]
            chunks = await events(StubEngine(script=script, tokenizer=tokenizer), **body)
            streamed = [choice for chunk in chunks for choice in chunk["choices"]]
            assert [id for each in streamed for id in each.get("token_ids", ())] == expected
            told = [each["logprobs"]["content"] for each in streamed if each["logprobs"]]
            assert [entry["token"] for part in told for entry in part] == names

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

    async def test_a_prompt_that_has_ended_it(self) -> None:
        """Then there is none in the answer, and a grammar is for all of it."""
        template = "{{ messages[0].content }}<think>\n\n</think>\n\n"
        stub = engine("a", template)
        reply = await post(stub, CHAT, messages=MESSAGES, regex="a+")
        assert reply["choices"][0]["message"]["content"] == "a"
        grammar = stub.calls[0].params.grammar
        assert grammar is not None
        assert "think" not in grammar.text

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
