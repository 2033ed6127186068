"""The openai client's responses against the real server: process, socket, model and text."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.support.model_server import MODEL, ROOT, Server
from tests.support.responses import checked_events

CAPITAL = "What is the capital of France?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "strict": True,
}

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
NO_SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}


class Verdict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    word: Literal["prime", "composite"]
    sure: bool


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def ask(client: openai.OpenAI, **options: Any) -> Response:
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": 40, **options}
    response: Response = client.responses.create(**options)
    return response


def test_a_response_and_the_same_response_streamed(client: openai.OpenAI) -> None:
    whole = ask(client, input=CAPITAL)
    assert whole.output_text
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    deltas = []
    options = {"model": MODEL, "input": CAPITAL, "temperature": 0, "max_output_tokens": 40}
    with client.responses.stream(**options) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
                assert event.snapshot == "".join(deltas)
    # It ended at the model's end of text or at the limit, whichever the processor's sums lead to.
    assert event.type in ("response.completed", "response.incomplete")
    final = event.response
    assert final.status == whole.status
    assert "".join(deltas) == final.output_text == whole.output_text
    assert deltas
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_bytes_of_a_stream(server: Server) -> None:
    body = {"input": CAPITAL, "max_output_tokens": 4, "stream": True}
    headers = {"Authorization": "Bearer secret"}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=60)
    events = checked_events(answer.text)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] == 4


def test_a_conversation_that_the_server_remembers(client: openai.OpenAI) -> None:
    first = ask(client, input="My name is Ada. Remember it.", instructions="You are helpful.")
    second = ask(client, input="What is my name?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    third = ask(client, input="Say it again.", previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    # The same, told by the client.
    told: Any = [
        {"role": "user", "content": "My name is Ada. Remember it."},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "What is my name?"},
    ]
    again = ask(client, input=told)
    assert again.output_text == second.output_text
    assert again.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens


def test_what_is_kept(client: openai.OpenAI) -> None:
    response = ask(client, input=CAPITAL, metadata={"purpose": "test"})
    assert client.responses.retrieve(response.id) == response
    (item,) = client.responses.input_items.list(response.id)
    assert item.type == "message"
    assert item.content[0].text == CAPITAL  # type: ignore[union-attr]
    client.responses.delete(response.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{response.id}' not"):
            act(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, input="Hi", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = ask(client, input=CAPITAL, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": f"{number}"} for number in range(7)]
    response = ask(client, input=given, max_output_tokens=1)
    listed = client.responses.input_items.list(response.id, limit=3, order="asc")
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert texts == [f"{number}" for number in range(7)]


def test_tools_there_and_back(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    first = ask(client, input="What is the weather in Paris?", **options, max_output_tokens=100)
    (call,) = first.output
    assert call.type == "function_call"
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "unit"}
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "It rains, 12 degrees.",
    }
    second = ask(client, input=[result], previous_response_id=first.id)
    assert second.output_text
    told: Any = [{"role": "user", "content": "What is the weather in Paris?"}, call, result]
    assert ask(client, input=told).output_text == second.output_text


def test_a_call_in_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL,
        input="What is the weather in Rome?",
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "weather"},
        temperature=0,
        max_output_tokens=100,
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    (call,) = final.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "unit"}


def test_an_answer_as_a_class(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "Is 7 prime?",
        "text_format": Verdict,
        "temperature": 0,
        "max_output_tokens": 100,
    }
    parsed = client.responses.parse(**options)
    assert isinstance(parsed.output_parsed, Verdict)
    with client.responses.stream(**options) as events:
        final = events.get_final_response()
    assert final.output_parsed == parsed.output_parsed


def test_log_probabilities(client: openai.OpenAI) -> None:
    response = ask(
        client,
        input=CAPITAL,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=6,
    )
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 6
    assert "".join(entry.token for entry in part.logprobs) == part.text
    for entry in part.logprobs:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob  # the most probable one was taken


def test_an_answer_that_is_cut_off(client: openai.OpenAI) -> None:
    response = ask(client, input="Tell me a story.", max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": [IMAGE]}, "input[0].content[0]"),
        ({"input": "x " * 20_000}, "input"),
        ({"text": {"format": NO_SCHEMA}}, "text.format"),
    ],
)
def test_errors(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **{"input": "Hi", **options})
    assert caught.value.param == param


def test_errors_of_other_kinds(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="isn't served here"):
        ask(client, input="Hi", model="nothing")
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        ask(stranger, input="Hi")
    response = ask(client, input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(response.id)


def test_a_client_that_leaves(client: openai.OpenAI, server: Server) -> None:
    stream = client.responses.create(
        model=MODEL,
        input="Count to a thousand.",
        max_output_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    server.wait_until_idle()


PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "responses.md").read_text(), re.S)


@pytest.mark.parametrize("program", PROGRAMS, ids=["conversation", "tools"])
def test_the_programs_of_the_page(
    server: Server, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = program.replace("http://localhost:8000", server.url).replace('"none"', '"secret"')
    exec(compile(program, "responses.md", "exec"), {})
    first, *rest = capsys.readouterr().out.splitlines()
    assert rest
    if first.startswith("weather"):
        assert first.startswith("weather {'city': '")
    else:
        assert first
        assert re.fullmatch(r"\d+ tokens found in the cache", rest[-1])
