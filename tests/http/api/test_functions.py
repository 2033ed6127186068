"""``functions`` and ``function_call``: tools, by the names that OpenAI had before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chats import (
    CALLS,
    CHAT,
    HERMES,
    MESSAGES,
    SEARCH,
    TOOLS,
    WEATHER,
    engine,
    events,
    refusal,
)
from tests.support.http_stub import post
from trioserve.requests.prompts import ChatPrompt

FUNCTIONS = [tool["function"] for tool in TOOLS]
ONE_CALL = CALLS[: CALLS.index("</tool_call>") + len("</tool_call>")]
ARGUMENTS = '{"city": "Köln"}'


async def test_whole() -> None:
    stub = engine(ONE_CALL)
    reply = await post(stub, CHAT, messages=MESSAGES, functions=FUNCTIONS)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "function_call": {"name": "weather", "arguments": ARGUMENTS},
    }


async def test_an_answer_without_a_call() -> None:
    reply = await post(engine("No call."), CHAT, messages=MESSAGES, functions=FUNCTIONS)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "No call.", "refusal": None}


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_a_stream(size: int) -> None:
    chunks = await events(engine(ONE_CALL, size=size), messages=MESSAGES, functions=FUNCTIONS)
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert calls[0]["name"] == "weather"
    assert "".join(call.get("arguments", "") for call in calls) == ARGUMENTS
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    assert not any("tool_calls" in delta for delta in deltas)
    assert choices[-1]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("legacy", "choice"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ({"name": "search"}, {"type": "function", "function": {"name": "search"}}),
    ],
)
async def test_the_engine_is_asked_as_for_tools(legacy: Any, choice: Any) -> None:
    """For tools with one call at most: there is room for no more in the answer."""
    stub = engine(ONE_CALL)
    await post(stub, CHAT, messages=MESSAGES, functions=FUNCTIONS, function_call=legacy)
    await post(
        stub,
        CHAT,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    functions, tools = stub.calls
    assert functions.prompt == tools.prompt
    assert functions.params == tools.params
    assert (functions.params.grammar is not None) is (legacy != "none")


@pytest.mark.parametrize("template", [HERMES, "{{ messages }}"])
async def test_earlier_messages(template: str) -> None:
    function = {"name": "weather", "arguments": ARGUMENTS}
    stub = engine("Warm.", template)
    legacy = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "weather", "content": "20 °C"},
    ]
    await post(stub, CHAT, messages=legacy)
    id = "call00001"
    call = {"id": id, "type": "function", "function": function}
    modern = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": id, "content": "20 °C"},
    ]
    await post(stub, CHAT, messages=modern)
    first, second = (each.prompt for each in stub.calls)
    assert isinstance(first, ChatPrompt)
    assert first == second
    assert "20 °C" in first.messages[-1]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "tools"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "tool_choice"),
        ({"functions": FUNCTIONS, "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"function_call": {"name": "search"}}, "function_call"),
        ({"functions": [], "function_call": {"name": "search"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "nope"}}, "function_call.name"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [SEARCH["function"]] * 2}, "functions[1].name"),
        ({"functions": [{"nam": "a"}]}, "functions[0].nam"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "function_call": {"name": "search"},
                        "tool_calls": [{"function": {"name": "search"}}],
                    }
                ]
            },
            "messages[0].function_call",
        ),
    ],
)
async def test_refused(fields: dict[str, Any], param: str) -> None:
    error = await refusal(engine("x"), **fields)
    assert error["param"] == param
    assert param in error["message"]


async def test_a_model_of_unknown_calls_is_refused_in_the_same_words() -> None:
    error = await refusal(engine("x", "{{ messages }}{{ tools }}"), functions=[WEATHER["function"]])
    assert error["param"] == "functions"
    assert error["message"].startswith("functions isn't served")
