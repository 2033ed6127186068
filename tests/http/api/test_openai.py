"""Chat and text completions: what a client sends reaches the engine, what it gives comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
import trio

from tests.support.http_stub import (
    StubEngine,
    StubTokenizer,
    client_of,
    events,
    http_client,
    post,
    served,
    with_logprobs,
    words,
)
from trioserve.requests.prompts import ChatPrompt, TextPrompt, TokensPrompt
from trioserve.requests.stream import Chunk

MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_chat() -> None:
    stub = StubEngine()
    reply = await post(stub, "/v1/chat/completions", messages=MESSAGES)
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "stub"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there !", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "matched_stop": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 13,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    (call,) = stub.calls
    assert call.prompt == ChatPrompt(messages=({"role": "user", "content": "Hi"},))
    assert call.params.max_tokens is None
    assert call.left.is_set()


async def test_chat_stream() -> None:
    chunks = await events(StubEngine(), "/v1/chat/completions", messages=MESSAGES)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:]] == [
        {"content": "Hello "},
        {"content": "there "},
        {"content": "!"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_with_usage() -> None:
    options = {"include_usage": True}
    chunks = await events(
        StubEngine(), "/v1/chat/completions", messages=MESSAGES, stream_options=options
    )
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 13


async def test_a_stop_string_is_named() -> None:
    stub = StubEngine(script=lambda _: words("one two", stop_reason="three"))
    reply = await post(stub, "/v1/chat/completions", messages=MESSAGES, stop="three")
    assert reply["choices"][0]["stop_reason"] == "three"
    chunks = await events(stub, "/v1/chat/completions", messages=MESSAGES, stop=["three"])
    assert chunks[-1]["choices"][0]["stop_reason"] == "three"
    assert [call.params.stop for call in stub.calls] == [("three",), ("three",)]


async def test_chunks_without_news_are_not_sent() -> None:
    script = [Chunk("", (1,)), Chunk("é", (2,)), Chunk("", (3,), finish_reason="length")]
    chunks = await events(StubEngine(script=lambda _: list(script)), "/v1/completions", prompt="x")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["é", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_sampling_fields_reach_the_engine() -> None:
    stub = StubEngine()
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "seed": 42,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    extra = {"logit_bias": {"5": 1.5}, "stop_token_ids": [3, 4], "stop": ["a", "b"]}
    identity = {"priority": 3, "cache_salt": "salt", "timeout": 12.5, "request_id": "mine"}
    await post(stub, "/v1/completions", prompt="x", **fields, **extra, **identity)
    (call,) = stub.calls
    assert {name: getattr(call.params, name) for name in fields} == fields
    assert call.params.logit_bias == {5: 1.5}
    assert call.params.stop_token_ids == (3, 4)
    assert call.params.stop == ("a", "b")
    expected = {"priority": 3, "cache_salt": "salt", "timeout": 12.5, "request_id": "cmpl-mine"}
    assert isinstance(call.options.pop("arrived"), float)
    unasked = {"adapter": "", "retention": None, "traceparent": "", "tracestate": "", "tenant": ""}
    assert call.options == {**expected, **unasked}


async def test_the_models_defaults_fill_in() -> None:
    stub = StubEngine(generation_defaults={"temperature": 0.6, "top_k": 20})
    await post(stub, "/v1/completions", prompt="x", top_k=5)
    await post(stub, "/v1/chat/completions", messages=MESSAGES, temperature=0)
    await post(stub, "/generate", text="x", sampling_params={"temperature": 0.1})
    params = [call.params for call in stub.calls]
    assert [(each.temperature, each.top_k) for each in params] == [(0.6, 5), (0, 20), (0.1, 20)]


async def test_default_lengths() -> None:
    stub = StubEngine()
    await post(stub, "/v1/completions", prompt="x")
    await post(stub, "/v1/chat/completions", messages=MESSAGES, max_completion_tokens=7)
    assert [call.params.max_tokens for call in stub.calls] == [16, 7]


async def test_values_that_ask_for_nothing() -> None:
    await post(
        StubEngine(),
        "/v1/chat/completions",
        messages=MESSAGES,
        n=1,
        tools=None,
        tool_choice="auto",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        modalities=["text"],
        stream=False,
        logprobs=False,
        logit_bias=None,
    )


async def test_tools_that_are_not_to_be_used() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    await post(
        StubEngine(), "/v1/chat/completions", messages=MESSAGES, tools=tools, tool_choice="none"
    )


async def test_messages_reach_the_template_as_they_are() -> None:
    template = "{{ messages }}{{ tools }}{{ enable_thinking }}"
    stub = StubEngine(tokenizer=StubTokenizer(template))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42", "name": "f"},
        {"role": "user"},
    ]
    await post(
        stub,
        "/v1/chat/completions",
        messages=messages,
        chat_template_kwargs={"enable_thinking": False},
        continue_final_message=True,
    )
    prompt = stub.calls[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0] == messages[0]
    assert prompt.messages[1] == messages[1]
    assert prompt.messages[2:] == tuple(messages[2:])
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt
    assert prompt.template_arguments == {"enable_thinking": False}


async def test_the_start_of_an_answer_can_be_left_out() -> None:
    stub = StubEngine()
    await post(stub, "/v1/chat/completions", messages=MESSAGES, add_generation_prompt=False)
    prompt = stub.calls[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, False)


async def test_chat_logprobs() -> None:
    stub = StubEngine(
        script=lambda call: [
            with_logprobs(Chunk("é", (233,)), call.params.logprobs or 0),
            with_logprobs(Chunk("b", (98,), finish_reason="stop"), call.params.logprobs or 0),
        ]
    )
    fields = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    reply = await post(stub, "/v1/chat/completions", **fields)
    content = reply["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "!", "logprob": -1.5, "bytes": [33]},
        ],
    }
    chunks = await events(stub, "/v1/chat/completions", **fields)
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"] is not None
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content
    assert [call.params.logprobs for call in stub.calls] == [2, 2]


async def test_logprobs_without_alternatives() -> None:
    stub = StubEngine(script=lambda _: [with_logprobs(Chunk("b", (98,), finish_reason="stop"), 0)])
    reply = await post(stub, "/v1/chat/completions", messages=MESSAGES, logprobs=True)
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert stub.calls[0].params.logprobs == 0


async def test_completion_logprobs() -> None:
    stub = StubEngine(
        script=lambda _: [
            with_logprobs(Chunk("ab", (97, 98)), 2),
            with_logprobs(Chunk("c", (99,), finish_reason="stop"), 2),
        ]
    )
    reply = await post(stub, "/v1/completions", prompt="x", logprobs=2)
    columns = reply["choices"][0]["logprobs"]
    assert columns["tokens"] == ["a", "b", "c"]
    assert columns["text_offset"] == [0, 1, 2]
    assert columns["token_logprobs"] == [-0.5] * 3
    assert columns["top_logprobs"][2] == {"c": -0.5, "!": -1.5}
    chunks = await events(stub, "/v1/completions", prompt="x", logprobs=2)
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", [TextPrompt("abc")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([97, 98], [TokensPrompt((97, 98))]),
        ([[97], [98, 99]], [TokensPrompt((97,)), TokensPrompt((98, 99))]),
    ],
)
async def test_prompts_of_every_form(prompt: Any, expected: list[Any]) -> None:
    stub = StubEngine()
    reply = await post(stub, "/v1/completions", prompt=prompt)
    assert [call.prompt for call in stub.calls] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["completion_tokens"] == 13 * len(expected)


async def test_add_special_tokens() -> None:
    stub = StubEngine()
    await post(stub, "/v1/completions", prompt="a", add_special_tokens=False)
    assert stub.calls[0].prompt == TextPrompt("a", add_special_tokens=False)


async def test_echo() -> None:
    stub = StubEngine()
    reply = await post(stub, "/v1/completions", prompt=[[97], [98]], echo=True)
    assert [choice["text"] for choice in reply["choices"]] == ["aHello there !", "bHello there !"]
    chunks = await events(stub, "/v1/completions", prompt="Say: ", echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Say: Hello there !"


async def test_a_batch_as_a_stream() -> None:
    stub = StubEngine(script=lambda call: words(f"{call.prompt.text} done"))  # type: ignore[union-attr]
    chunks = await events(
        stub, "/v1/completions", prompt=["x", "y"], stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "x done", 1: "y done"}
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    ids = [call.options["request_id"] for call in stub.calls]
    assert [request_id[-2:] for request_id in ids] == ["-0", "-1"]


async def test_models() -> None:
    client = client_of(StubEngine(), served_model_name=("gpt", "stub-2"))
    listed = json.loads(await (await client.get("/v1/models")).get_data(True))
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["gpt", "stub-2"]
    assert listed["data"][0]["root"] == "stub"
    assert listed["data"][0]["max_model_len"] == 2048
    one = json.loads(await (await client.get("/v1/models/gpt")).get_data(True))
    assert one == listed["data"][0]
    assert (await client.get("/v1/models/other")).status_code == 404
    for name, status in (("stub-2", 200), ("stub", 404)):
        reply = await client.post("/v1/completions", json={"model": name, "prompt": "x"})
        assert reply.status_code == status


async def test_the_openai_client() -> None:
    """Use the library that most clients use, over a socket; it speaks asyncio, so in a thread."""

    def talk(url: str) -> tuple[str, str, list[str], str]:
        with httpx.Client(trust_env=False, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=http)
            whole = client.chat.completions.create(
                model="stub", messages=[{"role": "user", "content": "Hi"}]
            )
            stream = client.chat.completions.create(
                model="stub",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            streamed = "".join(
                chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices
            )
            names = [model.id for model in client.models.list()]
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model="other", prompt="x")
            return whole.choices[0].message.content or "", streamed, names, str(caught.value.code)

    async with served(StubEngine()) as url:
        result = await trio.to_thread.run_sync(talk, url)
    assert result == ("Hello there !", "Hello there !", ["stub"], "model_not_found")


async def test_request_ids_come_back() -> None:
    stub = StubEngine()
    async with served(stub) as url, http_client(url) as client:
        body = {"prompt": "x"}
        given = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1"})
        assert given.headers["X-Request-Id"] == "abc-1"
        assert given.json()["id"] == "cmpl-abc-1"
        strange = await client.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "with space"}
        )
        assert len(strange.headers["X-Request-Id"]) == 32
    assert stub.calls[0].options["request_id"] == "cmpl-abc-1"
