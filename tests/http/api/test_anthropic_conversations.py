"""The prompts that Anthropic's messages make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.api.test_anthropic import (
    COUNT,
    PATH,
    TOOLS,
    ask,
    counting,
    prompt_of,
    text,
)
from tests.support.chats import MESSAGES, engine
from tests.support.http_stub import (
    client_of,
)


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
