"""Chats for the tests: engines that say what they are to say, and what a client makes of it."""

from __future__ import annotations

import json
from typing import Any

from tests.support.http_stub import Step, StubEngine, StubTokenizer, client_of, http_client, served
from trioserve.requests.stream import Chunk

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
THINKS = "{{ tools }}{{ messages }}{% if enable_thinking %}<tool_call>{}<think>{% endif %}"
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>{"name": "search"}</tool_call>'
)


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
    """Return the data of a stream's events by a real server; the test client can't hold many."""
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
    """Return the messages accumulated from a stream, by the index of the choice."""
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
    """Return a choice in the form of :func:`accumulated`."""
    message = choice["message"]
    found = {"finish_reason": choice["finish_reason"], "role": message["role"]}
    found["content"] = message["content"] or ""
    found |= {name: message[name] for name in ("reasoning", "reasoning_content") if name in message}
    if "tool_calls" in message:
        found["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return found
