"""SGLang's /generate, single and in batches, streaming and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_stub import StubEngine, client_of, with_logprobs, words

from trioserve.request import TextPrompt, TokensPrompt
from trioserve.stream import Chunk


async def post(stub: StubEngine, **body: Any) -> Any:
    response = await client_of(stub).post("/generate", json=body)
    assert response.status_code == 200, await response.get_data(True)
    return json.loads(await response.get_data(True))


async def events(stub: StubEngine, **body: Any) -> list[Any]:
    response = await client_of(stub).post("/generate", json={**body, "stream": True})
    assert response.status_code == 200, await response.get_data(True)
    *parts, done, rest = (await response.get_data(True)).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_single() -> None:
    stub = StubEngine()
    reply = await post(stub, text="ab", rid="mine")
    assert reply["text"] == "Hello there !"
    assert reply["output_ids"] == [ord(character) for character in "Hello there !"]
    meta = reply["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 2,
        "completion_tokens": 13,
        "cached_tokens": 1,
    }
    assert "index" not in reply
    (call,) = stub.calls
    assert call.prompt == TextPrompt("ab")
    assert call.options["request_id"] == "mine"
    assert call.params.max_tokens == 128


async def test_sampling_params_by_their_names_there() -> None:
    stub = StubEngine()
    await post(
        stub,
        input_ids=[5, 6],
        sampling_params={
            "max_new_tokens": 7,
            "min_new_tokens": 2,
            "sampling_seed": 9,
            "no_stop_trim": True,
            "stop": ["x"],
            "stop_token_ids": [3],
            "temperature": 0,
            "top_k": -1,
            "n": 1,
        },
        priority=4,
        extra_key="salt",
    )
    (call,) = stub.calls
    assert call.prompt == TokensPrompt((5, 6))
    params = call.params
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 9)
    assert params.include_stop_str_in_output
    assert (params.stop, params.stop_token_ids) == (("x",), (3,))
    assert (params.temperature, params.top_k) == (0, -1)
    assert call.options["priority"] == -4
    assert call.options["cache_salt"] == "salt"


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("stop", None, {"type": "stop"}),
        ("stop", "x", {"type": "stop", "matched": "x"}),
        ("stop", 7, {"type": "stop", "matched": 7}),
        ("length", None, {"type": "length", "length": 1}),
    ],
)
async def test_finish_reasons(finish: str, stop_reason: Any, expected: Any) -> None:
    stub = StubEngine(script=lambda _: words("a", finish=finish, stop_reason=stop_reason))
    reply = await post(stub, text="x")
    assert reply["meta_info"]["finish_reason"] == expected
    (event,) = await events(stub, text="x")
    assert event["meta_info"]["finish_reason"] == expected


async def test_a_stream_repeats_what_was_before() -> None:
    parts = await events(StubEngine(), text="x")
    assert [part["text"] for part in parts] == ["Hello ", "Hello there ", "Hello there !"]
    assert [len(part["output_ids"]) for part in parts] == [6, 12, 13]
    assert [part["meta_info"]["completion_tokens"] for part in parts] == [6, 12, 13]
    assert [part["meta_info"]["finish_reason"] for part in parts] == [None, None, {"type": "stop"}]


async def test_a_batch() -> None:
    stub = StubEngine(script=lambda call: words(call.prompt.text))  # type: ignore[union-attr]
    replies = await post(
        stub,
        text=["a b", "c"],
        sampling_params=[{"temperature": 0}, {"temperature": 0.5}],
        rid=["r0", "r1"],
    )
    assert [reply["text"] for reply in replies] == ["a b", "c"]
    assert [reply["index"] for reply in replies] == [0, 1]
    assert [reply["meta_info"]["id"] for reply in replies] == ["r0", "r1"]
    assert [call.params.temperature for call in stub.calls] == [0, 0.5]
    assert len(await post(stub, text=["only"])) == 1


async def test_a_batch_as_a_stream() -> None:
    stub = StubEngine(script=lambda call: words(call.prompt.text))  # type: ignore[union-attr]
    last = {part["index"]: part for part in await events(stub, text=["a b", "c"], rid="r")}
    assert {index: part["text"] for index, part in last.items()} == {0: "a b", 1: "c"}
    assert {part["meta_info"]["id"] for part in last.values()} == {"r-0", "r-1"}


@pytest.mark.parametrize("with_text", [False, True])
async def test_logprobs(with_text: bool) -> None:
    stub = StubEngine(
        script=lambda call: [
            with_logprobs(Chunk("a", (97,)), call.params.logprobs or 0),
            with_logprobs(Chunk("b", (98,), finish_reason="stop"), call.params.logprobs or 0),
        ]
    )
    fields = {
        "text": "x",
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": -1,
        "return_text_in_logprobs": with_text,
    }
    reply = await post(stub, **fields)
    meta = reply["meta_info"]
    text = (lambda word: word) if with_text else (lambda word: None)
    assert meta["output_token_logprobs"] == [[-0.5, 97, text("a")], [-0.5, 98, text("b")]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, text("a")], [-1.5, 33, text("!")]]
    assert meta["input_token_logprobs"] == []
    parts = await events(stub, **fields)
    assert [len(part["meta_info"]["output_token_logprobs"]) for part in parts] == [1, 2]
    assert parts[-1]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
