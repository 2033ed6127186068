"""SGLang's ``/generate`` over a whole engine: what is told is what the engine computed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.http_stub import serving_fake_engine


async def generate(client: httpx.AsyncClient, *, status: int = 200, **fields: Any) -> Any:
    response = await client.post("/generate", json=fields)
    assert response.status_code == status, response.text
    if not fields.get("stream"):
        return response.json()
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_several_outputs_are_those_of_the_engine() -> None:
    async with serving_fake_engine() as (engine, client):
        fields = {
            "text": ["one", "two"],
            "sampling_params": {"n": 3, "max_new_tokens": 6, "sampling_seed": 5},
        }
        replies = await generate(client, **fields)
        expected = [
            output
            for prompt in ("one", "two")
            for output in (await engine.complete(prompt, n=3, max_tokens=6, seed=5)).outputs
        ]
        assert [reply["output_ids"] for reply in replies] == [
            list(output.token_ids) for output in expected
        ]
        assert [reply["index"] for reply in replies] == list(range(6))
        assert len({tuple(reply["output_ids"]) for reply in replies[:3]}) == 3
        for reply in replies:
            assert reply["meta_info"]["prompt_tokens"] == 3
            assert reply["meta_info"]["completion_tokens"] == 6
        last = {event["index"]: event for event in await generate(client, stream=True, **fields)}
        assert {index: event["text"] for index, event in last.items()} == {
            reply["index"]: reply["text"] for reply in replies
        }


async def test_many_outputs_with_many_log_probabilities() -> None:
    """Stream so many that a step has more chunks than the reader takes until the next one."""
    async with serving_fake_engine() as (_, client):
        replies = await generate(
            client,
            text="x",
            sampling_params={"n": 48, "max_new_tokens": 60},
            return_logprob=True,
            top_logprobs_num=20,
        )
        assert len(replies) == 48
        assert {len(reply["meta_info"]["output_top_logprobs"]) for reply in replies} == {60}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_prompt(stream: bool) -> None:
    async with serving_fake_engine() as (engine, client):
        completion = await engine.complete(
            "a prompt", max_tokens=2, seed=1, logprobs=2, prompt_logprobs=2
        )
        assert completion.prompt_logprobs is not None
        ids = list(completion.prompt_token_ids)
        entries = completion.prompt_logprobs.entries(ids)
        reply = await generate(
            client,
            input_ids=ids,
            sampling_params={"max_new_tokens": 2, "sampling_seed": 1},
            return_logprob=True,
            logprob_start_len=2,
            top_logprobs_num=2,
            token_ids_logprob=[7],
            return_prompt_token_ids=True,
            stream=stream,
        )
        meta = (reply := reply[-1] if stream else reply)["meta_info"]
        assert reply["prompt_token_ids"] == ids
        assert meta["input_token_logprobs"] == [
            [None, ids[2], None],
            *([entry.logprob, entry.token_id, None] for entry in entries[2:]),
        ]
        assert meta["input_top_logprobs"] == [
            None,
            *([[logprob, id, None] for id, logprob, _ in entry.top] for entry in entries[2:]),
        ]
        assert [len(each) for each in meta["input_token_ids_logprobs"][1:]] == [1] * len(ids[3:])
        assert all(each[0][1] == 7 for each in meta["output_token_ids_logprobs"])
        assert completion.logprobs is not None
        assert [each[0] for each in meta["output_token_logprobs"]] == [
            entry.logprob for entry in completion.logprobs
        ]


async def test_a_position_past_the_prompt() -> None:
    async with serving_fake_engine() as (_, client):
        fields = {"input_ids": [1, 2], "return_logprob": True}
        fields["sampling_params"] = {"max_new_tokens": 1}
        reply = await generate(client, logprob_start_len=2, **fields)
        assert reply["meta_info"]["input_token_logprobs"] == []
        error = (await generate(client, logprob_start_len=3, status=400, **fields))["error"]
        assert error["param"] == "logprob_start_len"
        assert error["message"].startswith("logprob_start_len is 3")


async def test_a_prompt_alone() -> None:
    async with serving_fake_engine() as (_, client):
        reply = await generate(
            client,
            text="hello",
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        assert reply["text"] == ""
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert reply["meta_info"]["output_token_logprobs"] == []
        assert len(reply["meta_info"]["input_token_logprobs"]) == 5


async def test_a_regular_expression_ends_an_output() -> None:
    async with serving_fake_engine() as (_, client):
        sampling: dict[str, Any] = {"max_new_tokens": 40, "sampling_seed": 3}
        whole = await generate(client, text="hello", sampling_params=sampling)
        sampling["stop_regex"] = "[a-z]"
        reply = await generate(client, text="hello", sampling_params=sampling)
        cut = next(index for index, letter in enumerate(whole["text"]) if "a" <= letter <= "z")
        assert reply["text"] == whole["text"][:cut]
        kept = {**sampling, "no_stop_trim": True}
        reply = await generate(client, text="hello", sampling_params=kept)
        assert reply["text"] == whole["text"][: cut + 1]
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


async def test_what_the_engine_refuses_is_named_as_it_was_given() -> None:
    async with serving_fake_engine(max_logprobs=3) as (engine, client):
        for fields, param in (
            ({"text": "x", "return_logprob": True, "top_logprobs_num": 4}, "top_logprobs_num"),
            ({"input_ids": [engine.vocab_size]}, "input_ids"),
            ({"text": ""}, "text"),
            (
                {"text": "x", "sampling_params": {"stop_regex": "("}},
                "sampling_params.stop_regex",
            ),
            (
                {"text": "x", "sampling_params": [{"custom_params": {"a": 1}}]},
                "sampling_params[0].custom_params",
            ),
            (
                {"text": "x", "sampling_params": {"stop_token_ids": [engine.vocab_size]}},
                "sampling_params.stop_token_ids",
            ),
        ):
            error = (await generate(client, status=400, **fields))["error"]
            assert error["param"] == param
            assert param in error["message"]
