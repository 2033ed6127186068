"""Log-probabilities in SGLang's /generate."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.api.test_sglang import (
    asked,
    events,
    post,
    prompt_logprobs,
    without_times,
)
from tests.support.http_stub import StubEngine, with_logprobs
from trioserve.requests.stream import Chunk


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


async def test_logprob_start_len_says_nothing_without_logprobs() -> None:
    stub = StubEngine()
    reply = await post(stub, text=["x", "y"], logprob_start_len=[0, -1])
    assert "input_token_logprobs" not in reply[0]["meta_info"]
    assert [call.params.prompt_logprobs for call in stub.calls] == [None, None]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [[None, 98], [-1, 99], [-2, 100], [-3, 101]]),
        (1, [[None, 99], [-2, 100], [-3, 101]]),
        (3, [[None, 101]]),
        (4, []),
        (-1, []),
        (None, []),
    ],
)
async def test_logprobs_of_the_prompt(
    start: int | None, expected: list[Any], long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:  # Put into words in a thread.
        monkeypatch.setattr("trioserve.http.api.threads.LONG", 0)
    stub = StubEngine(script=asked, prompt_logprobs=prompt_logprobs)
    fields = {
        "text": "bcde",
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 1,
        "token_ids_logprob": [66, 67],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
        "rid": "r",
    }
    reply = await post(stub, **fields)
    meta = reply["meta_info"]
    assert reply["prompt_token_ids"] == [98, 99, 100, 101]
    assert [entry[:2] for entry in meta["input_token_logprobs"]] == expected
    assert all(chr(token) == text for _, token, text in meta["input_token_logprobs"])
    rest = expected[1:]
    first = [None] if expected else []
    assert meta["input_top_logprobs"] == first + [[[value / 2, 65, "A"]] for value, _ in rest]
    assert meta["input_token_ids_logprobs"] == first + [
        [[value - 7, 66, "B"], [value - 7, 67, "C"]] for value, _ in rest
    ]
    assert meta["output_token_ids_logprobs"] == [[[-3, 66, "B"], [-3, 67, "C"]]]
    (event,) = await events(stub, **fields)
    without_times(event["meta_info"])
    without_times(meta)
    assert event == reply


@pytest.mark.parametrize(
    ("start", "mean"), [(None, -2.0), (-1, -2.0), (0, -2.0), (2, -3.0), (3, None)]
)
async def test_the_mean_logprob_of_a_prompt(start: int | None, mean: float | None) -> None:
    stub = StubEngine(script=asked, prompt_logprobs=prompt_logprobs)
    fields = {"text": "bcde", "return_normalized_logprob": True, "logprob_start_len": start}
    meta = (await post(stub, **fields))["meta_info"]
    assert meta["normalized_prompt_logprob"] == mean
    assert "input_token_logprobs" not in meta
    meta = (await post(stub, **fields, return_logprob=True))["meta_info"]
    assert meta["normalized_prompt_logprob"] == mean
    assert (meta["input_token_logprobs"] == []) == (start in (None, -1))
    (part,) = await events(stub, **fields)
    assert part["meta_info"]["normalized_prompt_logprob"] == mean
