"""The anthropic Python client against the real server: process, socket, model and text."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import jsonschema
import pytest
import trio
from anthropic.types import Message, TextBlock, ToolUseBlock

from tests.support.model_server import MODEL, ROOT, Server

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
"""Sampling is no argument of the client's any more."""
TOOLS: Any = [
    {"name": name, "description": "The weather in a city", "input_schema": WEATHER}
    for name in ("weather_now", "weather_tomorrow")
]


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def text_of(message: Message) -> str:
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return block.text


def test_a_message_and_the_same_message_streamed(client: anthropic.Anthropic) -> None:
    options: Any = {"model": MODEL, "messages": CAPITAL, "max_tokens": 40, "extra_body": GREEDY}
    whole = client.messages.create(**options)
    assert (whole.role, whole.model) == ("assistant", MODEL)
    assert whole._request_id
    assert whole.id == f"msg_{whole._request_id}"
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_events_of_a_stream(client: anthropic.Anthropic) -> None:
    kinds = [
        event.type
        for event in client.messages.create(
            model=MODEL, messages=CAPITAL, max_tokens=4, stream=True, extra_body=GREEDY
        )
    ]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_system_prompt_and_earlier_turns(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model=MODEL,
        system=[{"type": "text", "text": "You are a geographer."}],
        messages=[
            {"role": "user", "content": "My favourite city is Rome."},
            {"role": "assistant", "content": [{"type": "text", "text": "A fine city."}]},
            {"role": "user", "content": [{"type": "text", "text": "Which one did I name?"}]},
        ],
        max_tokens=30,
        extra_body=GREEDY,
    )
    assert text_of(reply)


def test_max_tokens_and_stop_sequences(client: anthropic.Anthropic) -> None:
    count: Any = [{"role": "user", "content": "Count from one to ten in words."}]
    short = client.messages.create(model=MODEL, messages=count, max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    begun: Any = [*count, {"role": "assistant", "content": "One, two, three, four"}]
    options: Any = {"model": MODEL, "messages": begun, "max_tokens": 20, "extra_body": GREEDY}
    whole = text_of(client.messages.create(**options))
    stop = whole[len(whole) // 2 :][:4]
    reply = client.messages.create(**options, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert text_of(reply) == whole.partition(stop)[0]


def test_sampling(client: anthropic.Anthropic) -> None:
    replies = {
        text_of(
            client.messages.create(
                model=MODEL,
                messages=CAPITAL,
                max_tokens=8,
                metadata={"user_id": "me"},
                extra_body={"temperature": 1.0, "top_k": 1, "top_p": 0.9},
            )
        )
        for _ in range(2)
    }
    assert len(replies) == 1


@pytest.mark.parametrize("named", [None, "weather_tomorrow"])
def test_tools_that_have_to_be_called(client: anthropic.Anthropic, named: str | None) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice: Any = {"type": "tool", "name": named} if named else {"type": "any"}
    options: Any = {"model": MODEL, "tools": TOOLS, "max_tokens": 80, "extra_body": GREEDY}
    asked = {**options, "messages": messages}
    asked["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    (call,) = whole.content
    assert isinstance(call, ToolUseBlock)
    assert call.name in ((named,) if named else ("weather_now", "weather_tomorrow"))
    jsonschema.validate(call.input, WEATHER)

    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert len(pieces) > 1
    (same,) = streamed.content
    assert isinstance(same, ToolUseBlock)
    assert (same.name, same.input, streamed.stop_reason) == (call.name, call.input, "tool_use")

    messages += [
        {"role": "assistant", "content": whole.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}],
        },
    ]
    answer = client.messages.create(**options, messages=messages, tool_choice={"type": "none"})
    assert text_of(answer)


def test_counting_tokens(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=CAPITAL, system="Be brief.")
    usage = client.messages.create(
        model=MODEL, messages=CAPITAL, system="Be brief.", max_tokens=1
    ).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_are_those_that_the_client_knows(
    server: Server, client: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model=MODEL, messages=CAPITAL, max_tokens=5, extra_body={"temperature": -1}
        )
    with pytest.raises(anthropic.BadRequestError, match="8192"):
        long: Any = [{"role": "user", "content": "word " * 9000}]
        client.messages.create(model=MODEL, messages=long, max_tokens=5)
    with pytest.raises(anthropic.NotFoundError, match="claude") as missing:
        client.messages.create(model="claude", messages=CAPITAL, max_tokens=5)
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(
            model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=5
        )
    with pytest.raises(anthropic.AuthenticationError):
        stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        stranger.messages.create(model=MODEL, messages=CAPITAL, max_tokens=5)


def test_a_key_as_a_bearer(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, auth_token="secret", max_retries=0)
    assert client.messages.create(model=MODEL, messages=CAPITAL, max_tokens=1).content


async def test_messages_beside_each_other_under_trio(server: Server) -> None:
    kinds: list[str] = []

    async def ask(stream: bool) -> None:
        options: Any = {"model": MODEL, "messages": CAPITAL, "max_tokens": 8}
        if stream:
            async with client.messages.stream(**options) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**options)
        kinds.append(message.content[0].type)

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret") as client:
        async with trio.open_nursery() as nursery:
            for stream in (True, False, True):
                nursery.start_soon(ask, stream)
    assert kinds == ["text"] * 3


def test_a_client_that_leaves_its_stream_aborts_it(
    server: Server, client: anthropic.Anthropic
) -> None:
    story: Any = [{"role": "user", "content": "Tell a very long story about a king."}]
    stream = client.messages.create(model=MODEL, messages=story, max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until_idle()


def test_the_program_of_the_page(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "dialects.md").read_text()
    (program,) = [
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "anthropic" in each
    ]
    program = program.replace("http://localhost:8000", server.url).replace('"none"', '"secret"')
    exec(compile(program, "dialects.md", "exec"), {})
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("tool_use weather {'city': ")
    assert rest
