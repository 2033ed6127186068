"""Completions that echo their prompt or tell its log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.api.test_completions import PATH, both, stub_of
from tests.support.http_stub import (
    StubTokenizer,
    events,
    post,
)


@pytest.mark.parametrize("prompt", ["xyz", [120, 121, 122]])
async def test_echo_with_logprobs(prompt: Any) -> None:
    (choice,) = await both(prompt=prompt, echo=True, logprobs=1, max_tokens=2)
    assert choice["text"] == "xyzaa"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3, 4],
        "token_logprobs": [None, -1, -2, -0.5, -0.5],
        "tokens": ["x", "y", "z", "a", "a"],
        "top_logprobs": [None, {"y": -1, "!": -0.25}, {"z": -2, "!": -0.25}, *[{"a": -0.5}] * 2],
    }


async def test_echo_with_logprobs_and_no_output() -> None:
    (choice,) = await both(prompt="xyz", echo=True, logprobs=0, max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1, -2]
    assert choice["logprobs"]["top_logprobs"] == [None, {"y": -1}, {"z": -2}]


async def test_every_output_has_its_echo() -> None:
    choices = await both(prompt=["xy", [122]], n=2, echo=True, logprobs=0)
    assert [choice["text"] for choice in choices] == ["xyaa", "xybb", "zaa", "zbb"]
    offsets = [choice["logprobs"]["text_offset"] for choice in choices]
    assert offsets == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] * 2


async def test_a_streamed_echo_comes_first() -> None:
    chunks = await events(stub_of(), PATH, prompt="xyz", echo=True, logprobs=0)
    first, second = (chunk["choices"][0] for chunk in chunks[:2])
    assert (first["text"], first["finish_reason"]) == ("xyz", None)
    assert first["logprobs"]["token_logprobs"] == [None, -1, -2]
    assert (second["text"], second["logprobs"]["text_offset"]) == ("a", [3])


async def test_no_output_and_no_echo() -> None:
    (choice,) = await both(prompt="xyz", max_tokens=0, logprobs=1)
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("", None, "length")


async def test_of_a_prompt_that_was_cut_the_rest_is_echoed() -> None:
    stub = stub_of()
    reply = await post(stub, PATH, prompt="xyz", echo=True, truncate_prompt_tokens=2)
    assert reply["choices"][0]["text"] == "yzaa"
    assert reply["usage"]["prompt_tokens"] == 2
    reply = await post(stub, PATH, prompt="xyz", echo=True, truncate_prompt_tokens=-1)
    assert reply["choices"][0]["text"] == "xyzaa"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_echo_of_ids_keeps_special_tokens(stream: bool) -> None:
    stub = stub_of(tokenizer=StubTokenizer(tokens={"y": ord("y")}))
    fields = {"prompt": [120, 121, 122], "echo": True, "max_tokens": 0}
    if stream:
        replies = await events(stub, PATH, **fields)
    else:
        replies = [await post(stub, PATH, **fields)]
    assert "".join(reply["choices"][0]["text"] for reply in replies) == "xyz"


async def test_prompt_logprobs() -> None:
    reply = await post(stub_of(), PATH, prompt=["xyz", "w"], n=2, prompt_logprobs=1)
    expected = [
        None,
        {
            "121": {"logprob": -1, "rank": 7, "decoded_token": "y"},
            "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
        },
        {
            "122": {"logprob": -2, "rank": 7, "decoded_token": "z"},
            "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
        },
    ]
    found = [choice["prompt_logprobs"] for choice in reply["choices"]]
    assert found == [expected, expected, [None], [None]]
    assert all(choice["logprobs"] is None for choice in reply["choices"])


@pytest.mark.parametrize(("own", "echoed"), [(0, 2), (2, 0), (1, 1)])
async def test_prompt_logprobs_beside_an_echo(own: int, echoed: int) -> None:
    """Return as many alternatives for each of the two as it was asked for."""
    stub = stub_of()
    body = {"prompt_logprobs": own, "logprobs": echoed, "echo": True, "max_tokens": 0}
    reply = await post(stub, PATH, prompt="xy", **body)
    (choice,) = reply["choices"]
    assert len(choice["prompt_logprobs"][1]) == 1 + own
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + echoed
    assert stub.calls[0].params.prompt_logprobs == max(own, echoed)
