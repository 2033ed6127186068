"""Ollama's ``/api``: what its fields become, and what its answers and lines are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats import CALLS, HERMES, MESSAGES, SEARCH, THINKS, TOOLS, engine
from tests.support.http_stub import (
    Call,
    StubEngine,
    StubTokenizer,
    check_leaving,
    client_of,
    http_client,
    post,
    served,
    with_logprobs,
    words,
)
from trioserve.protocol.errors import EngineError, InvalidRequest, QueueFull
from trioserve.requests.prompts import ChatPrompt, TextPrompt
from trioserve.requests.stream import Chunk

CHAT = "/api/chat"
TEXT = "/api/generate"
THOUGHTS = "<think>\nHm.\n</think>\n\n"
METRICS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
}


async def ask(stub: StubEngine, path: str = CHAT, **body: Any) -> Any:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    return await post(stub, path, **{**asked, "stream": False, **body})


async def lines(stub: StubEngine, path: str = CHAT, **body: Any) -> list[Any]:
    """Return the objects of a stream, which is the default form of an answer."""
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    async with served(stub) as url, http_client(url) as client:
        response = await client.post(path, json={**asked, **body})
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == "application/x-ndjson"
    *parts, rest = response.text.split("\n")
    assert rest == ""
    return [json.loads(part) for part in parts]


async def refusal(stub: StubEngine, path: str = CHAT, **body: Any) -> str:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    response = await client_of(stub).post(path, json={**asked, **body})
    reply = json.loads(await response.get_data(True))
    assert response.status_code == 400, reply
    assert set(reply) == {"error"}
    message: str = reply["error"]
    return message


def accumulated(lines: list[Any]) -> Any:
    """Return the answer that a client builds from a stream."""
    *pieces, last = lines
    assert [line["done"] for line in lines] == [False] * len(pieces) + [True]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        for name in ("content", "thinking"):
            if name in line["message"]:
                message[name] = message.get(name, "") + line["message"][name]
        message.setdefault("tool_calls", []).extend(line["message"].get("tool_calls", ()))
    if not message["tool_calls"]:
        del message["tool_calls"]
    return {**last, "message": message}


def comparable(reply: Any) -> Any:
    """Without what is made by chance or takes time."""
    message = {**reply["message"]}
    if "tool_calls" in message:
        message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    changing = {"created_at", *(name for name in METRICS if name.endswith("_duration"))}
    return {name: value for name, value in reply.items() if name not in changing} | {
        "message": message
    }


class TestAnswers:
    async def test_whole(self) -> None:
        reply = await ask(StubEngine(script=lambda _: words("Hello there !")))
        assert set(reply) == {"model", "created_at", "done", "done_reason", "message", *METRICS}
        assert reply["message"] == {"role": "assistant", "content": "Hello there !"}
        assert (reply["done"], reply["done_reason"], reply["model"]) == (True, "stop", "stub")
        assert (reply["prompt_eval_count"], reply["eval_count"]) == (1, 13)
        assert all(isinstance(reply[name], int) and reply[name] >= 0 for name in METRICS)
        assert reply["total_duration"] > 0

    async def test_lines(self) -> None:
        first, second, third, last = await lines(
            StubEngine(script=lambda _: words("Hello there !", finish="length"))
        )
        assert second["message"] == {"role": "assistant", "content": "there "}
        assert set(third) == {"model", "created_at", "done", "message"}
        assert last["message"]["content"] == ""
        assert (last["done_reason"], last["eval_count"]) == ("length", 13)
        assert set(last) > METRICS
        assert first["created_at"].endswith("Z")

    async def test_a_prompt(self) -> None:
        stub = StubEngine(script=lambda _: words("Hello there !"))
        whole = await ask(stub, TEXT)
        assert whole["response"] == "Hello there !"
        assert "message" not in whole
        *pieces, last = await lines(stub, TEXT)
        assert "".join(line["response"] for line in pieces) == "Hello there !"
        assert (last["response"], last["done_reason"]) == ("", "stop")

    @pytest.mark.parametrize("size", [1, 3, 1000])
    @pytest.mark.parametrize(
        "text", [CALLS, "No call.", CALLS[12:], THOUGHTS + CALLS, f"{THOUGHTS}Yes.", "", CALLS[:70]]
    )
    async def test_a_stream_adds_up_to_the_whole(self, text: str, size: int) -> None:
        whole = await ask(engine(text, THINKS), tools=TOOLS)
        found = await lines(engine(text, THINKS, size=size), tools=TOOLS)
        assert comparable(accumulated(found)) == comparable(whole)

    async def test_calls_are_told_whole(self) -> None:
        found = await lines(engine(THOUGHTS + CALLS, THINKS), tools=TOOLS)
        message = accumulated(found)["message"]
        assert message["thinking"] == "Hm."
        assert message["content"] == "Let me see."
        calls = [call["function"] for call in message["tool_calls"]]
        assert calls == [
            {"index": 0, "name": "weather", "arguments": {"city": "Köln"}},
            {"index": 1, "name": "search", "arguments": {}},
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        reply = await ask(engine(CALLS[:70], finish="length"), tools=TOOLS)
        (call,) = reply["message"]["tool_calls"]
        assert call["function"]["arguments"] == {}

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_logprobs(self, path: str) -> None:
        stub = StubEngine(script=lambda _: [with_logprobs(Chunk("ab", (97, 98)), 2), *words("c")])
        reply = await ask(stub, path, logprobs=True, top_logprobs=2)
        assert [entry["token"] for entry in reply["logprobs"]] == ["a", "b"]
        assert [each["token"] for each in reply["logprobs"][0]["top_logprobs"]] == ["a", "!"]
        assert stub.calls[0].params.logprobs == 2
        first, *_ = await lines(stub, path, logprobs=True)
        assert first["logprobs"][0]["top_logprobs"] == []

    async def test_nothing_asked(self) -> None:
        for body in ({"messages": []}, {"messages": None, "keep_alive": 0}):
            reply = await ask(StubEngine(), **body)
            assert (reply["done"], reply["done_reason"]) == (True, "load")
        for prompt in ({"prompt": ""}, {"prompt": None, "keep_alive": -1}):
            reply = await post(StubEngine(), TEXT, **prompt)
            assert (reply["done_reason"], reply["response"]) == ("load", "")

    async def test_silence_is_broken_by_lines_that_add_nothing(self) -> None:
        stub = StubEngine(script=lambda _: [0.5, *words("late")])
        async with served(stub, keep_alive_interval=0.05) as url, http_client(url) as client:
            response = await client.post(CHAT, json={"messages": MESSAGES})
        found = [json.loads(line) for line in response.text.splitlines()]
        assert len(found) > 2
        assert found[0]["message"] == {"role": "assistant", "content": ""}
        assert accumulated(found)["message"]["content"] == "late"


async def prompt_of(template: str = HERMES, path: str = CHAT, **body: Any) -> ChatPrompt:
    stub = engine("a", template)
    await ask(stub, path, **body)
    prompt = stub.calls[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


class TestRequests:
    async def test_options(self) -> None:
        options = {
            **{"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
            **{"seed": 5, "stop": ["x"], "repeat_penalty": 1.1, "presence_penalty": 0.5},
            **{"frequency_penalty": 0.25, "num_ctx": 4096, "num_gpu": 1, "mirostat": 0},
        }
        for path in (CHAT, TEXT):
            stub = engine("a")
            await ask(stub, path, options=options, keep_alive="5m")
            params = stub.calls[0].params
            assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
            assert (params.top_p, params.min_p, params.seed, params.stop) == (0.9, 0.1, 5, ("x",))
            assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.5)
            assert params.frequency_penalty == 0.25

    @pytest.mark.parametrize("options", [{"num_predict": -1, "seed": -1}, {"num_predict": -2}, {}])
    async def test_options_that_leave_it_open(self, options: dict[str, int]) -> None:
        stub = engine("a")
        await ask(stub, options=options)
        assert (stub.calls[0].params.max_tokens, stub.calls[0].params.seed) == (None, None)

    @pytest.mark.parametrize(
        ("format", "kind"),
        [
            ("", None),
            (None, None),
            ("json", "json_schema"),
            ({"type": "object", "properties": {"a": {"type": "integer"}}}, "json_schema"),
        ],
    )
    @pytest.mark.parametrize("raw", [False, True])
    async def test_formats(self, format: Any, kind: str | None, raw: bool) -> None:
        stub = engine("{}")
        await ask(stub, TEXT, format=format, raw=raw)
        grammar = stub.calls[0].params.grammar
        assert (grammar and grammar.kind) == kind

    async def test_turns(self) -> None:
        call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
        other = {"function": {"name": "search", "arguments": {"q": 1}}, "id": "mine"}
        messages = [
            {"role": "system", "content": "Be brief."},
            *MESSAGES,
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, other]},
            {"role": "tool", "tool_name": "search", "content": "None"},
            {"role": "tool", "content": "Rain"},
        ]
        prompt = await prompt_of(messages=messages, tools=TOOLS)
        system, user, answer, second, first = prompt.messages
        assert (system["role"], user) == ("system", MESSAGES[0])
        assert answer["reasoning_content"] == "Hm."
        ids = [each["id"] for each in answer["tool_calls"]]
        assert ids == ["call00000", "mine"]
        assert answer["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
        assert (second["tool_call_id"], second["name"]) == ("mine", "search")
        assert (first["tool_call_id"], first["content"]) == ("call00000", "Rain")

    async def test_a_prompt_and_a_system_prompt(self) -> None:
        prompt = await prompt_of(path=TEXT, prompt="Hi", system="Be brief.")
        assert prompt.messages == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        )

    async def test_a_raw_prompt(self) -> None:
        stub = engine(f"{THOUGHTS}{CALLS}", THINKS)
        reply = await ask(stub, TEXT, prompt="<s>Hi", raw=True)
        assert stub.calls[0].prompt == TextPrompt("<s>Hi")
        assert reply["response"] == f"{THOUGHTS}{CALLS}"
        for name, value in (("system", "x"), ("think", True)):
            message = await refusal(engine("a", THINKS), TEXT, raw=True, **{name: value})
            assert message.startswith(f"{name} needs a chat template")

    async def test_thinking(self) -> None:
        for think, switch in (
            (True, {"enable_thinking": True}),
            (False, {"enable_thinking": False}),
            ("high", {"enable_thinking": True}),
            (None, {}),
        ):
            assert (await prompt_of(THINKS, think=think)).template_arguments == switch
        both = THINKS + "{{ reasoning_effort }}"
        arguments = (await prompt_of(both, think="low")).template_arguments
        assert arguments == {"enable_thinking": True, "reasoning_effort": "low"}
        reply = await ask(engine(f"{THOUGHTS}Yes.", THINKS), think=False)
        assert reply["message"] == {"role": "assistant", "content": "Yes."}
        assert (await refusal(engine("a"), think=True)).startswith("think isn't served")

    async def test_names(self) -> None:
        for name in ("stub", "stub:latest"):
            assert (await ask(StubEngine(), model=name))["model"] == "stub"
        for name in ("other", "stub:7b"):
            response = await client_of(StubEngine()).post(
                CHAT, json={"model": name, "messages": MESSAGES}
            )
            assert response.status_code == 404
            assert name in (await response.get_json())["error"]

    async def test_what_is_nested_too_deeply(self) -> None:
        """Around the depth that can just be read, and not written: no failure of the server's."""
        for depth in (100, *range(440, 500, 4), 5000):
            schema = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
            body = {"messages": MESSAGES, "format": "SCHEMA", "tools": [SEARCH], "stream": False}
            text = json.dumps(body).replace('"SCHEMA"', schema)
            response = await client_of(engine("")).post(
                CHAT, data=text, headers={"Content-Type": "application/json"}
            )
            assert response.status_code in ((200,) if depth == 100 else (200, 400))


@pytest.mark.parametrize("path", [CHAT, "/api/generate"])
async def test_a_body_that_curl_calls_a_form(path: str) -> None:
    """Ollama's users write `curl -d` alone; a page's form says the same, and where it is from."""
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    body = json.dumps({"model": "stub", "stream": False, **asked})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    client = client_of(engine(""))
    response = await client.post(path, data=body, headers=headers)
    assert response.status_code == 200
    response = await client.post(path, data=body, headers={**headers, "Origin": "null"})
    assert response.status_code == 415
    response = await client.post(path, data=body, headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "begin"),
        [
            (CHAT, {"options": {"temperature": -1}}, "options.temperature: "),
            (CHAT, {"options": {"num_predict": -3}}, "options.num_predict: "),
            (CHAT, {"options": {"mirostat": 2}}, "options.mirostat isn't served"),
            (CHAT, {"options": {"stop_words": []}}, "options.stop_words is not a field"),
            (CHAT, {"options": {"stop": ["x"] * 100}}, "options.stop: "),
            (CHAT, {"temperature": 1}, "temperature is not a field"),
            (CHAT, {"format": "xml"}, "format: "),
            (CHAT, {"think": "a lot"}, "think: "),
            (CHAT, {"truncate": True}, "truncate isn't served"),
            (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
            (CHAT, {"tools": [SEARCH, SEARCH]}, "tools[1].function.name is 'search'"),
            (
                CHAT,
                {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
                "messages: this model reads text only",
            ),
            (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role: invalid"),
            (TEXT, {"images": ["aGk="]}, "prompt: this model reads text only"),
            (TEXT, {"suffix": "x"}, "suffix isn't served"),
            (TEXT, {"template": "{{ .Prompt }}"}, "template isn't served"),
            (TEXT, {"context": [1, 2]}, "context isn't served"),
        ],
    )
    async def test_fields(self, path: str, body: dict[str, Any], begin: str) -> None:
        assert (await refusal(engine("a"), path, **body)).startswith(begin)

    @pytest.mark.parametrize(
        ("path", "param", "expected"),
        [
            (CHAT, "max_tokens", "options.num_predict is too much"),
            (CHAT, "repetition_penalty", "options.repeat_penalty is too much"),
            (CHAT, "grammar", "format is too much"),
            (CHAT, "prompt", "messages is too much"),
            (TEXT, "prompt", "prompt is too much"),
        ],
    )
    async def test_a_field_that_is_refused_late(self, path: str, param: str, expected: str) -> None:
        async def admit(_: Call) -> None:
            raise InvalidRequest(f"{param} is too much", param=param)

        stub = StubEngine(admit=admit, tokenizer=StubTokenizer(HERMES))
        assert await refusal(stub, path, format={"type": "object"}) == expected


class TestErrors:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_before_a_stream(self, stream: bool) -> None:
        async def admit(_: Call) -> None:
            raise QueueFull("full", retry_after=1.2)

        body = {"messages": MESSAGES, "stream": stream}
        response = await client_of(StubEngine(admit=admit)).post(CHAT, json=body)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "2"
        assert await response.get_json() == {"error": "full"}

    async def test_in_a_stream(self) -> None:
        stub = StubEngine(script=lambda _: [Chunk("a", (97,)), EngineError("broken")])
        first, last = await lines(stub)
        assert first["message"]["content"] == "a"
        assert last == {"error": "broken"}

    async def test_of_http(self) -> None:
        client = client_of(StubEngine(), api_key=("one",))
        headers = {"Authorization": "Bearer one"}
        for response, status in (
            (await client.post(CHAT, json={}), 401),
            (await client.get(CHAT, headers=headers), 405),
            (await client.post("/api/pull", json={}, headers=headers), 404),
            (await client.post(CHAT, data="{", headers=headers), 400),
        ):
            assert response.status_code == status
            assert isinstance((await response.get_json())["error"], str)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_client_that_leaves(path: str, stream: bool) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "x", "raw": True}
    await check_leaving(path, {**asked, "stream": stream}, first=b'"a"' if stream else None)
