"""The ollama Python client against the real server: process, socket, model and text."""

from __future__ import annotations

import re
from typing import Any

import ollama
import pydantic
import pytest
import trio

from tests.support.model_server import MODEL, ROOT, Server

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 40}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(server.url, headers={"Authorization": "Bearer secret"})


def test_a_chat_and_the_same_chat_streamed(client: ollama.Client) -> None:
    whole = client.chat(MODEL, CAPITAL, options=GREEDY)
    assert (whole.message.role, whole.done) == ("assistant", True)
    parts = list(client.chat(MODEL, CAPITAL, options=GREEDY, stream=True))
    assert len(parts) > 3
    text = "".join(part.message.content or "" for part in parts)
    assert text == whole.message.content
    assert text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count


def test_how_long_it_took(client: ollama.Client) -> None:
    reply = client.chat(MODEL, CAPITAL, options={"num_predict": 5})
    total = reply.total_duration or 0
    parts = [reply.load_duration, reply.prompt_eval_duration, reply.eval_duration]
    assert total > 0
    assert total >= sum(part or 0 for part in parts) > 0
    assert (reply.eval_count, reply.done_reason) == (5, "length")


def test_earlier_turns(client: ollama.Client) -> None:
    messages = [
        {"role": "system", "content": "You are a geographer."},
        {"role": "user", "content": "My favourite city is Rome."},
        {"role": "assistant", "content": "A fine city."},
        {"role": "user", "content": "Which one did I name?"},
    ]
    assert client.chat(MODEL, messages, options=GREEDY).message.content


def test_a_prompt_whole_streamed_and_raw(client: ollama.Client) -> None:
    prompt = "What is the capital of France?"
    whole = client.generate(MODEL, prompt, system="Be brief.", options=GREEDY)
    parts = client.generate(MODEL, prompt, system="Be brief.", options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.response
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY)
    assert raw.response


def test_sampling(client: ollama.Client) -> None:
    options = ollama.Options(
        seed=5, temperature=0.9, top_k=20, top_p=0.9, repeat_penalty=1.1, num_predict=12, num_ctx=64
    )
    texts = {client.generate(MODEL, "Once", options=options).response for _ in range(2)}
    assert len(texts) == 1
    whole = client.generate(MODEL, "Count to ten.", options=GREEDY).response or ""
    stop = whole[len(whole) // 2 :][:4]
    begun = client.generate(MODEL, "Count to ten.", options={**GREEDY, "stop": [stop]})
    assert (begun.response, begun.done_reason) == (whole.partition(stop)[0], "stop")


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    large: bool


def test_formats(client: ollama.Client) -> None:
    reply = client.chat(MODEL, CAPITAL, format=City.model_json_schema(), options=GREEDY)
    assert City.model_validate_json(reply.message.content or "")
    with pytest.raises(ollama.ResponseError, match="format") as bad:
        client.chat(MODEL, CAPITAL, format={"type": "nonsense"})
    assert bad.value.status_code == 400


def test_tools(client: ollama.Client) -> None:
    """The model is told of tools in words, as its template knows none, and need not call any."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    parts = list(client.chat(MODEL, messages, tools=[WEATHER], options=GREEDY, stream=True))
    whole = client.chat(MODEL, messages, tools=[WEATHER], options=GREEDY)
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function for call in calls] == [
        call.function for call in whole.message.tool_calls or ()
    ]
    call = ollama.Message.ToolCall.Function(
        name="weather", arguments={"city": "Paris", "unit": "celsius"}
    )
    messages += [
        ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=call)]),
        ollama.Message(role="tool", tool_name="weather", content="It rains."),
    ]
    answer = client.chat(MODEL, messages, tools=[WEATHER], options=GREEDY).message
    assert answer.content or answer.tool_calls


def test_log_probabilities(client: ollama.Client) -> None:
    reply = client.chat(MODEL, CAPITAL, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert reply.logprobs is not None
    assert len(reply.logprobs) == 3
    assert all(len(entry.top_logprobs or ()) == 2 for entry in reply.logprobs)


def test_embeddings(client: ollama.Client) -> None:
    reply = client.embed(MODEL, ["a cat", "a dog"])
    assert len(reply.embeddings) == 2
    assert len(reply.embeddings[0]) == 576


def test_the_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == MODEL
    (running,) = client.ps().models
    assert (running.name, running.digest) == (MODEL, model.digest)
    shown = client.show(f"{MODEL}:latest")
    assert "completion" in (shown.capabilities or ())
    assert shown.modelinfo is not None
    assert shown.modelinfo["trioserve.context_length"] == 8192


def test_a_model_that_is_to_be_loaded(client: ollama.Client) -> None:
    assert client.generate(MODEL, keep_alive=-1).done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"


def test_errors_are_those_that_the_client_knows(server: Server, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="llama3") as missing:
        client.chat("llama3", CAPITAL)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as bad:
        next(iter(client.chat(MODEL, CAPITAL, options={"temperature": -1}, stream=True)))
    assert bad.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="images"):
        client.generate(MODEL, "What is it?", images=[b"x"])
    with pytest.raises(ollama.ResponseError, match="8192"):
        client.generate(MODEL, "word " * 9000)
    with pytest.raises(ollama.ResponseError) as refused:
        ollama.Client(server.url).chat(MODEL, CAPITAL)
    assert refused.value.status_code == 401


async def test_chats_beside_each_other_under_trio(server: Server) -> None:
    client = ollama.AsyncClient(server.url, headers={"Authorization": "Bearer secret"})
    texts: list[str] = []

    async def ask() -> None:
        parts = await client.chat(MODEL, CAPITAL, options={"num_predict": 8}, stream=True)
        texts.append("".join([part.message.content or "" async for part in parts]))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert len(texts) == 3
    assert all(texts)


def test_a_client_that_leaves_its_stream_aborts_it(server: Server, client: ollama.Client) -> None:
    options = {"num_predict": 4000}
    stream = client.generate(MODEL, "Once upon a time", raw=True, stream=True, options=options)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    server.wait_until_idle()


def test_the_program_of_the_page(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "dialects.md").read_text()
    (program,) = [
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "ollama" in each
    ]
    program = program.replace("http://localhost:8000", server.url).replace('"none"', '"secret"')
    exec(compile(program, "dialects.md", "exec"), {})
    *text, speed = capsys.readouterr().out.splitlines()
    assert text
    assert re.fullmatch(r"\d+ tokens a second", speed)
