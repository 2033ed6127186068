"""``/v1/completions``: several outputs, echo, log-probabilities of prompts, token ids."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import httpx
import numpy as np
import openai
import pytest
import trio

from tests.support.http_stub import (
    Call,
    Step,
    StubEngine,
    captured_logs,
    events,
    http_client,
    post,
    served,
    with_logprobs,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import TextPrompt, TokensPrompt
from trioserve.requests.stream import Chunk, TokenLogprob

PATH = "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}


def prompt_ids(call: Call) -> tuple[int, ...]:
    if isinstance(call.prompt, TokensPrompt):
        return call.prompt.token_ids
    assert isinstance(call.prompt, TextPrompt)
    return tuple(ord(character) for character in call.prompt.text)


def scored(call: Call) -> PromptLogprobs | None:
    """Score a prompt's token at position p by -p, "!" and "?" by -0.25 and -0.5."""
    num_top = call.params.prompt_logprobs
    if num_top is None:
        return None
    found = PromptLogprobs(1, num_top, call.params.logprob_token_ids)
    count = len(prompt_ids(call)) - 1
    best = min(num_top, 2)
    piece = wire.PromptPiece(
        slot=0,
        start=1,
        logprobs=np.arange(-1, -1 - count, -1, dtype=np.float32).tobytes(),
        ranks=np.full(count, 7, np.int32).tobytes(),
        top_ids=np.array([[33, 63][:best]] * count, np.int32).tobytes(),
        top_logprobs=np.array([[-0.25, -0.5][:best]] * count, np.float32).tobytes(),
        ids_logprobs=np.full((count, len(call.params.logprob_token_ids)), -6, np.float32).tobytes(),
    )
    found.add(piece)
    return found


def outputs(call: Call) -> list[Step]:
    """Output i says the letter i twice, in two steps; the outputs take turns."""
    if call.params.max_tokens == 0:
        return [Chunk("", index=i, finish_reason="length") for i in range(call.params.n)]
    chunks = []
    for finish in (None, "length"):
        for i in range(call.params.n):
            chunk = Chunk(chr(97 + i), (97 + i,), index=i, finish_reason=finish)
            if call.params.logprobs is not None:
                chunk = with_logprobs(chunk, call.params.logprobs)
            chunks.append(chunk)
    return list(chunks)


def stub_of(**options: Any) -> StubEngine:
    return StubEngine(**{"script": outputs, "prompt_logprobs": scored, **options})


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Return a stream's choices, joined by their index."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "finish_reason": None})
            assert choice["finish_reason"] is None
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            for name, column in (piece["logprobs"] or {}).items():
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(column)
            for name in ("token_ids", "prompt_token_ids"):
                if name in piece:
                    choice.setdefault(name, []).extend(piece[name])
    return choices


async def both(**body: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion, and assert that they are the same streamed."""
    reply = await post(stub_of(), PATH, **body)
    streamed = joined(await events(stub_of(), PATH, **body))
    assert sorted(streamed) == list(range(len(reply["choices"])))
    for choice in reply["choices"]:
        for name, value in streamed[choice["index"]].items():
            assert choice[name] == value, name
    choices: list[dict[str, Any]] = reply["choices"]
    return choices


async def test_several_outputs() -> None:
    choices = await both(prompt="x", n=3)
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "aa"),
        (1, "bb"),
        (2, "cc"),
    ]


async def test_several_outputs_of_several_prompts() -> None:
    stub = stub_of()
    reply = await post(stub, PATH, prompt=["x", "yz"], n=2)
    texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert texts == [(0, "aa"), (1, "bb"), (2, "aa"), (3, "bb")]
    assert [call.params.n for call in stub.calls] == [2, 2]
    # Each prompt once, every output.
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 8)
    chunks = await events(stub, PATH, prompt=["x", "yz"], n=2, **USAGE)
    assert {index: choice["text"] for index, choice in joined(chunks).items()} == dict(texts)
    assert chunks[-1]["usage"] == reply["usage"]


async def test_the_access_log_counts_every_output() -> None:
    with captured_logs() as logs:
        async with served(stub_of()) as url, http_client(url) as client:
            await client.post(PATH, json={"prompt": "xyz", "n": 3})
            await client.post(PATH, json={"prompt": "xyz", "n": 3, "stream": True})
    lines = [entry for entry in logs if entry["event"] == "request"]
    assert [(line["prompt_tokens"], line["completion_tokens"]) for line in lines] == [(3, 6)] * 2


def graded(call: Call) -> list[Step]:
    """Outputs of the mean log-probabilities -3, -1, -2, -4; the second is the shortest."""
    chunks = []
    for index, (text, grade) in enumerate([("aa", -3), ("b", -1), ("cc", -2), ("dd", -4)]):
        entries = tuple(TokenLogprob(ord(each), grade, each) for each in text)
        ids = tuple(map(ord, text))
        chunks.append(Chunk(text, ids, index, entries, finish_reason="stop"))
    return list(chunks)


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_best_of_several(logprobs: int | None) -> None:
    stub = stub_of(script=graded)
    reply = await post(stub, PATH, prompt="x", n=2, best_of=4, logprobs=logprobs)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "b"),
        (1, "cc"),
    ]
    assert [choice["logprobs"] is None for choice in reply["choices"]] == [logprobs is None] * 2
    assert reply["usage"]["completion_tokens"] == 7
    (call,) = stub.calls
    assert (call.params.n, call.params.logprobs) == (4, 0)


async def test_best_of_no_more_than_are_given() -> None:
    stub = stub_of()
    choices = joined(await events(stub, PATH, prompt="x", n=2, best_of=2))
    assert sorted(choices) == [0, 1]
    assert (stub.calls[0].params.n, stub.calls[0].params.logprobs) == (2, None)


async def test_log_probabilities_of_tokens_asked_for_by_id() -> None:
    reply = await post(stub_of(), PATH, prompt="xy", prompt_logprobs=1, logprob_token_ids=[42, 121])
    (choice,) = reply["choices"]
    assert list(choice["prompt_logprobs"][1]) == ["121", "33", "42"]
    assert choice["prompt_logprobs"][1]["121"]["rank"] == 7
    assert choice["prompt_logprobs"][1]["42"] == {
        "logprob": -6,
        "rank": None,
        "decoded_token": "*",
    }

    def asked(call: Call) -> list[Step]:
        entry = TokenLogprob(97, -0.5, "a", (), ((42, -6.0, "*"),))
        return [Chunk("a", (97,), logprobs=(entry,), finish_reason="stop")]

    body = {"prompt": "x", "logprobs": 0, "logprob_token_ids": [42]}
    reply = await post(stub_of(script=asked), PATH, **body)
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "*": -6}]


async def test_asked_tokens_in_place_of_the_most_probable_ones() -> None:
    def asked(call: Call) -> list[Step]:
        entry = TokenLogprob(97, -0.5, "a", ((98, -0.1, "b"),), ((42, -3.0, "*"),))
        return [Chunk("a", (97,), logprobs=(entry,), finish_reason="stop")]

    stub = stub_of(script=asked)
    reply = await post(stub, PATH, prompt="x", logprobs=2, logprob_token_ids=[42])
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "*": -3.0}]
    assert stub.calls[0].params.logprobs == 0


async def test_token_ids() -> None:
    choices = await both(prompt="xy", n=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in choices] == [[97, 97], [98, 98]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[120, 121]] * 2
    reply = await post(stub_of(), PATH, prompt="xy")
    (choice,) = reply["choices"]
    assert "token_ids" not in choice
    assert (choice["prompt_token_ids"], choice["prompt_logprobs"]) == (None, None)


async def test_token_ids_are_streamed_before_their_text() -> None:
    script: list[Step] = [Chunk("", (1,)), Chunk("é", (2,), finish_reason="length")]
    stub = stub_of(script=lambda _: list(script))
    chunks = await events(stub, PATH, prompt="x", return_token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [1], [2]]


async def test_tokens_named_by_their_ids() -> None:
    body = {"return_tokens_as_token_ids": True, "logprobs": 2, "echo": True, "max_tokens": 2}
    (choice,) = await both(prompt="xy", **body)
    names = ["token_id:120", "token_id:121", "token_id:97", "token_id:97"]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["top_logprobs"][1] == {
        "token_id:121": -1,
        "token_id:33": -0.25,
        "token_id:63": -0.5,
    }
    assert choice["text"] == "xyaa"


async def test_of_tokens_with_one_text_the_more_probable_counts() -> None:
    """Parts of characters all look alike; harnesses take the largest for the best token's."""

    def alike(call: Call) -> list[Step]:
        top = ((0xD8, -0.1, "?"), (0xD9, -3.0, "?"))
        entry = TokenLogprob(0xD9, -3.0, "?", top)
        return [Chunk("?", (0xD9,), logprobs=(entry,), finish_reason="stop")]

    stub = stub_of(script=alike)
    stub.tokenizer.token_text = lambda token: "?"  # type: ignore[method-assign]
    reply = await post(stub, PATH, prompt="x", logprobs=2)
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"?": -0.1}]
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-3.0]


async def test_the_logarithm_of_zero() -> None:
    def impossible(call: Call) -> list[Step]:
        entry = TokenLogprob(97, float("-inf"), "a")
        return [Chunk("a", (97,), logprobs=(entry,), finish_reason="stop")]

    reply = await post(stub_of(script=impossible), PATH, prompt="x", logprobs=0)
    columns = reply["choices"][0]["logprobs"]
    assert columns["token_logprobs"] == [-9999.0]
    assert columns["top_logprobs"] == [{"a": -9999.0}]


async def test_usage_in_every_event() -> None:
    body = {"prompt": "xyz", "n": 2, "stream_options": {"continuous_usage_stats": True}}
    chunks = await events(stub_of(), PATH, **body)
    assert not any("usage" in chunk for chunk in chunks)
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    chunks = await events(stub_of(), PATH, **body)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "elsewhere"), [(8, False), (1100, True)])
async def test_what_is_long_to_tell_holds_up_nobody(
    length: int, elsewhere: bool, stream: bool
) -> None:
    """Log-probabilities of long prompts are put into words in a thread; it says the same."""
    threads = set()
    stub = stub_of()

    def token_text(token: int) -> str:
        threads.add(threading.current_thread())
        return chr(token)

    stub.tokenizer.token_text = token_text  # type: ignore[method-assign]
    body = {"prompt": "x" * length, "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        choice = joined(await events(stub, PATH, **body))[0]
    else:
        (choice,) = (await post(stub, PATH, **body))["choices"]
    assert choice["text"] == "x" * length
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, length))]
    assert len(threads) == 1
    assert (threading.main_thread() in threads) != elsewhere


async def test_fields_of_all_three_reach_the_engine() -> None:
    stub = stub_of()
    fields = {
        "allowed_token_ids": [1, 2],
        "logprob_token_ids": [3],
        "bad_words": ["a", "b"],
        "stop_regex": ["c+"],
        "truncate_prompt_tokens": 5,
        "truncation_side": "right",
        "n": 2,
    }
    await post(stub, PATH, prompt="x", logprobs=1, vllm_xargs={"a": [1]}, **fields)
    await post(stub, PATH, prompt="x", custom_params={"b": 2}, no_stop_trim=True, regex="a+")
    await post(stub, PATH, prompt="x", structured_outputs={"choice": ["a"]}, rid="mine")
    await post(stub, PATH, prompt="x", extra_key="salt", spaces_between_special_tokens=False)
    first, second, third, fourth = stub.calls
    given = attrs.asdict(first.params, recurse=False)
    for name, value in fields.items():
        assert given[name] == (tuple(value) if isinstance(value, list) else value)
    assert first.params.extra_args == {"a": [1]}
    assert first.params.grammar is None
    assert second.params.extra_args == {"b": 2}
    assert second.params.include_stop_str_in_output
    assert second.params.grammar == Grammar("regex", "a+")
    assert third.params.grammar == Grammar("choice", '["a"]')
    assert third.options["request_id"] == "cmpl-mine"
    assert fourth.options["cache_salt"] == "salt"
    assert not fourth.params.spaces_between_special_tokens


@pytest.mark.parametrize(
    ("fields", "param", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "grammar", "response_format"),
        ({"structured_outputs": {"regex": "("}}, "grammar", "structured_outputs.regex"),
        ({"guided_json": {"a": 1}}, "grammar", "guided_json"),
        ({"vllm_xargs": {"a": 1}}, "extra_args", "vllm_xargs"),
        ({"custom_params": {"a": 1}}, "extra_args", "custom_params"),
        ({"echo": True, "logprobs": 20}, "prompt_logprobs", "logprobs"),
        ({"prompt_logprobs": 20}, "prompt_logprobs", "prompt_logprobs"),
        ({"prompt_logprobs": 20, "echo": True, "logprobs": 1}, *["prompt_logprobs"] * 2),
        ({"best_of": 3}, "n", "best_of"),
        ({"n": 3}, "n", "n"),
    ],
)
async def test_what_the_engine_refuses_has_the_clients_name(
    fields: dict[str, Any], param: str, name: str
) -> None:
    async def refuse(call: Call) -> None:
        raise InvalidRequest(f"nobody can follow {param}", param=param)

    async with served(stub_of(admit=refuse)) as url, http_client(url) as client:
        response = await client.post(PATH, json={"prompt": "x", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (name, f"nobody can follow {name}")


async def test_the_openai_client() -> None:
    def talk(url: str) -> None:
        with httpx.Client(trust_env=False, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=http)
            whole = client.completions.create(
                model="stub", prompt="xy", n=2, best_of=2, echo=True, logprobs=1, max_tokens=2
            )
            assert [choice.text for choice in whole.choices] == ["xyaa", "xybb"]
            logprobs = whole.choices[1].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs == [None, -1, -0.5, -0.5]
            assert logprobs.text_offset == [0, 1, 2, 3]
            stream = client.completions.create(
                model="stub",
                prompt=["x", "y"],
                n=2,
                stream=True,
                extra_body={
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
                },
            )
            texts = dict.fromkeys(range(4), "")
            counts = []
            for chunk in stream:
                assert chunk.usage is not None
                counts.append(chunk.usage.completion_tokens)
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == {0: "aa", 1: "bb", 2: "aa", 3: "bb"}
            assert counts == sorted(counts)
            assert counts[-1] == 8

    async with served(stub_of()) as url:
        await trio.to_thread.run_sync(talk, url)
