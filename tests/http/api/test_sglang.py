"""SGLang's /generate, single and in batches, streaming and not."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from tests.support.http_stub import Call, Step, StubEngine, client_of, with_logprobs, words
from trioserve.protocol import wire
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import TextPrompt, TokensPrompt
from trioserve.requests.stream import Chunk, TokenLogprob


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


def without_times(meta: dict[str, Any]) -> None:
    """Take out what differs with the time."""
    del meta["e2e_latency"], meta["response_sent_to_client_ts"]


async def test_single() -> None:
    stub = StubEngine()
    before = time.time()
    reply = await post(stub, text="ab", rid="mine")
    assert reply["text"] == "Hello there !"
    assert reply["output_ids"] == [ord(character) for character in "Hello there !"]
    meta = reply["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert before <= meta.pop("response_sent_to_client_ts") <= time.time()
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
            "stop_regex": "y+",
            "stop_token_ids": [3],
            "temperature": 0,
            "top_k": -1,
            "n": 1,
            "spaces_between_special_tokens": False,
            "custom_params": {"weight": 2},
        },
        priority=4,
        extra_key="salt",
    )
    (call,) = stub.calls
    assert call.prompt == TokensPrompt((5, 6))
    params = call.params
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 9)
    assert params.include_stop_str_in_output
    assert (params.stop, params.stop_regex) == (("x",), ("y+",))
    assert params.stop_token_ids == (3,)
    assert params.extra_args == {"weight": 2}
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
        ("abort", None, {"type": "abort"}),
    ],
)
async def test_finish_reasons(finish: str, stop_reason: Any, expected: Any) -> None:
    stub = StubEngine(script=lambda _: words("a", finish=finish, stop_reason=stop_reason))
    reply = await post(stub, text="x")
    assert reply["meta_info"]["finish_reason"] == expected
    (event,) = await events(stub, text="x")
    assert event["meta_info"]["finish_reason"] == expected


async def test_the_end_of_sequence_that_the_model_chose_is_what_matched() -> None:
    stub = StubEngine(
        script=lambda _: [Chunk("a", (97, 5), finish_reason="stop")], eos_token_ids=(4, 5)
    )
    reply = await post(stub, text="x")
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 5}


async def test_a_stream_repeats_what_was_before() -> None:
    parts = await events(StubEngine(), text="x")
    assert [part["text"] for part in parts] == ["Hello ", "Hello there ", "Hello there !"]
    assert [len(part["output_ids"]) for part in parts] == [6, 12, 13]
    assert [part["meta_info"]["completion_tokens"] for part in parts] == [6, 12, 13]
    assert [part["meta_info"]["finish_reason"] for part in parts] == [None, None, {"type": "stop"}]
    sent = ["response_sent_to_client_ts" in part["meta_info"] for part in parts]
    assert sent == [False, False, True]


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


def two_outputs(call: Call) -> list[Step]:
    """Yield two outputs of one prompt, mixed as they come."""
    prompt = call.prompt
    assert isinstance(prompt, TextPrompt)
    return [
        Chunk(prompt.text, (1,), index=0),
        Chunk(prompt.text.upper(), (2,), index=1),
        Chunk("!", (3,), index=1, finish_reason="length"),
        Chunk("?", (4,), index=0, finish_reason="length"),
    ]


async def test_several_outputs_of_each_prompt() -> None:
    stub = StubEngine(script=two_outputs)
    fields = {"text": ["a", "b"], "sampling_params": {"n": 2}, "rid": "r"}
    replies = await post(stub, **fields)
    assert [call.params.n for call in stub.calls] == [2, 2]
    assert [reply["text"] for reply in replies] == ["a?", "A!", "b?", "B!"]
    assert [reply["index"] for reply in replies] == [0, 1, 2, 3]
    assert [reply["output_ids"] for reply in replies] == [[1, 4], [2, 3]] * 2
    ids = [reply["meta_info"]["id"] for reply in replies]
    assert ids == ["r-0-0", "r-0-1", "r-1-0", "r-1-1"]
    assert {reply["meta_info"]["completion_tokens"] for reply in replies} == {2}
    last = {part["index"]: part for part in await events(stub, **fields)}
    for part, reply in zip((last[index] for index in range(4)), replies, strict=True):
        for each in (part, reply):
            without_times(each["meta_info"])
        assert part == reply


async def test_several_outputs_of_a_single_prompt_are_a_list() -> None:
    replies = await post(StubEngine(script=two_outputs), text="a", sampling_params={"n": 2})
    assert [reply["index"] for reply in replies] == [0, 1]


def column(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def ids_column(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def prompt_logprobs(call: Call) -> PromptLogprobs | None:
    """For a prompt of 4 tokens: that of the token at position p is -p, the best one is token 65."""
    params = call.params
    if params.prompt_logprobs is None:
        return None
    start = max(params.prompt_logprobs_start, 1)
    positions = range(start, 4)
    found = PromptLogprobs(
        start=start, num_top=params.prompt_logprobs, token_ids=params.logprob_token_ids
    )
    top = params.prompt_logprobs
    piece = wire.PromptPiece(
        slot=0,
        start=start,
        logprobs=column(*(-p for p in positions)),
        ranks=ids_column(*(2 for _ in positions)),
        top_ids=ids_column(*(65 for _ in range(top) for _ in positions)),
        top_logprobs=column(*(-p / 2 for p in positions for _ in range(top))),
        ids_logprobs=column(*(-p - 7 for p in positions for _ in params.logprob_token_ids)),
    )
    found.add(piece)
    return found


def asked(call: Call) -> list[Step]:
    ids = call.params.logprob_token_ids
    entry = TokenLogprob(97, -0.5, "a", (), tuple((token, -3.0, chr(token)) for token in ids))
    return [Chunk("a", (97,), logprobs=(entry,), finish_reason="stop")]


async def test_events_that_hold_only_what_is_new() -> None:
    stub = StubEngine(
        script=lambda call: [
            with_logprobs(Chunk(text, (ord(text),), finish_reason=finish), 0)
            for text, finish in (("a", None), ("b", None), ("c", "length"))
        ],
        prompt_logprobs=prompt_logprobs,
    )
    fields = {"text": "bcde", "return_logprob": True, "logprob_start_len": 0}
    parts = await events(stub, **fields, stream_output=True)
    assert [part["text"] for part in parts] == ["a", "b", "c"]
    assert [part["output_ids"] for part in parts] == [[97], [98], [99]]
    metas = [part["meta_info"] for part in parts]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2, 3]
    assert [len(meta["output_token_logprobs"]) for meta in metas] == [1, 1, 1]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [4, 0, 0]
    assert metas[-1]["finish_reason"] == {"type": "length", "length": 3}


async def test_what_goes_with_each_prompt_of_a_batch() -> None:
    stub = StubEngine(script=asked)
    replies = await post(
        stub,
        input_ids=[[1, 2], [3, 4, 5]],
        return_logprob=[True, False],
        logprob_start_len=[1, -1],
        top_logprobs_num=[3, 0],
        token_ids_logprob=[[7, 8], []],
        extra_key=["one", "two"],
    )
    first, second = stub.calls
    assert first.prompt == TokensPrompt((1, 2))
    assert (first.params.logprobs, second.params.logprobs) == (3, None)
    assert (first.params.prompt_logprobs, first.params.prompt_logprobs_start) == (3, 1)
    assert first.params.logprob_token_ids == (7, 8)
    assert [call.options["cache_salt"] for call in stub.calls] == ["one", "two"]
    assert "output_token_logprobs" in replies[0]["meta_info"]
    assert "output_token_logprobs" not in replies[1]["meta_info"]


STRUCTURE = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    ("field", "value", "kind", "rule"),
    [
        ("regex", "a+", "regex", "a+"),
        ("ebnf", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("json_schema", '{"type": "object"}', "json_schema", {"type": "object"}),
        ("json_schema", {"type": "integer"}, "json_schema", {"type": "integer"}),
        ("json_schema", "$$ANY$$", "json_schema", {"type": "object"}),
        ("structural_tag", STRUCTURE, "structural_tag", STRUCTURE),
        ("structural_tag", json.dumps(STRUCTURE), "structural_tag", STRUCTURE),
    ],
)
async def test_what_the_output_has_to_follow(field: str, value: Any, kind: str, rule: Any) -> None:
    stub = StubEngine()
    await post(stub, text="x", sampling_params={field: value})
    grammar = stub.calls[0].params.grammar
    assert grammar is not None
    assert grammar.kind == kind
    assert (json.loads(grammar.text) if isinstance(rule, dict) else grammar.text) == rule


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"text": "x", "input_ids": [1]}, "input_ids", "exactly one of text, input_ids"),
        ({}, "text", "exactly one of text, input_ids"),
        ({"text": []}, "text", "length >= 1"),
        ({"input_ids": [1, [2]]}, "input_ids", "a list of token ids, or a list of such lists"),
        (
            {"text": "x", "sampling_params": {"temperature": -1}},
            "sampling_params.temperature",
            ">= 0",
        ),
        (
            {"text": "x", "sampling_params": [{"min_new_tokens": 5, "max_new_tokens": 2}]},
            "sampling_params[0].min_new_tokens",
            "at most max_new_tokens (2)",
        ),
        (
            {"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}},
            "sampling_params.ebnf",
            "at most one of",
        ),
        (
            {"text": "x", "sampling_params": {"json_schema": "no JSON"}},
            "sampling_params.json_schema",
            "sampling_params.json_schema",
        ),
        (
            {"text": "x", "sampling_params": {"structural_tag": {"triggers": ["a"]}}},
            "sampling_params.structural_tag.structures",
            "sampling_params.structural_tag",
        ),
        (
            {"text": ["x", "y"], "sampling_params": [{"n": 2}, {}]},
            "sampling_params.n",
            "the same for all prompts, got [1, 2]",
        ),
        ({"text": ["x", "y"], "rid": ["r"]}, "rid", "a list of 1 for 2 prompts"),
        ({"text": "x", "extra_key": ["a", "b"]}, "extra_key", "a list of 2 for 1 prompts"),
        (
            {"text": ["x", "y"], "return_logprob": True, "token_ids_logprob": [[1]]},
            "token_ids_logprob",
            "a list of 1 for 2 prompts",
        ),
        ({"text": "x", "top_logprobs_num": 1}, "top_logprobs_num", "needs return_logprob"),
        ({"text": "x", "token_ids_logprob": [1]}, "token_ids_logprob", "needs return_logprob"),
        (
            {"text": "x", "custom_logit_processor": "code"},
            "custom_logit_processor",
            "nothing of a client's is executed",
        ),
    ],
)
async def test_refusals(fields: dict[str, Any], param: str, message: str) -> None:
    stub = StubEngine()
    response = await client_of(stub).post("/generate", json=fields)
    assert response.status_code == 400
    error = json.loads(await response.get_data(True))["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not stub.calls
