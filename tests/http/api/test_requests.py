"""Errors of requests: each is a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_stub import StubEngine, client_of
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.schema.reading import parse_body
from trioserve.http.api.sglang.schemas import GenerateRequest
from trioserve.protocol.errors import InvalidRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "x"},
    NATIVE: {"text": "x"},
}


async def refusal(path: str, body: Any) -> dict[str, Any]:
    """Return the error of a request that must be a 400 and must not reach the engine."""
    stub = StubEngine()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client_of(stub).post(path, data=data)
    assert response.status_code == 400
    assert stub.calls == []
    reply = json.loads(await response.get_data(True))
    assert set(reply) == {"error"}
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert reply["error"]["type"] == "invalid_request_error"
    error: dict[str, Any] = reply["error"]
    return error


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "input_ids", [1]),
        (CHAT, "audio", {}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "store", True),
        (CHAT, "service_tier", "flex"),
        (CHAT, "verbosity", "low"),
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "add_special_tokens", True),
        (TEXT, "suffix", "end"),
        (TEXT, "repetition_detection", {"min_count": 2}),
        (TEXT, "kv_transfer_params", {"a": 1}),
        (TEXT, "thinking_token_budget", 5),
        (TEXT, "custom_logit_processor", "code"),
        (TEXT, "logits_processors", ["package.Class"]),
        (TEXT, "guided_decoding_backend", "xgrammar"),
        (TEXT, "return_hidden_states", True),
        (TEXT, "bootstrap_room", 1),
        (NATIVE, "return_entropy", True),
        (NATIVE, "mm_hashes", ["x"]),
        (NATIVE, "lora_id", "x"),
    ],
)
async def test_known_and_not_served(path: str, field: str, value: Any) -> None:
    error = await refusal(path, {**MINIMAL[path], field: value})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{field} isn't served")


async def test_not_served_inside_another_field() -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    error = await refusal(TEXT, {**MINIMAL[TEXT], "stream": True, "stream_options": options})
    assert error["param"] == "stream_options.include_obfuscation"
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_unknown_fields(path: str) -> None:
    error = await refusal(path, {**MINIMAL[path], "temprature": 1})
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_parameter"
    assert error["message"] == "temprature is not a field of this request"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {}, "messages", "messages is missing"),
        (CHAT, {"messages": []}, "messages", "messages: expected array of length >= 1, got 0"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 1}]},
            "messages[0].content",
            "messages[0].content: expected str or array or null, got int",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "film_url"}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type: invalid value 'film_url', expected one of text, "
            "refusal, prompt_embeds, image_url, input_audio, audio_url, video_url",
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "max_tokens": "5"},
            "max_tokens",
            "max_tokens: expected int or null, got str",
        ),
        (CHAT, {**MINIMAL[CHAT], "stream": "yes"}, "stream", None),
        (CHAT, {**MINIMAL[CHAT], "stream_options": {"x": 1}}, "stream_options.x", None),
        (CHAT, {**MINIMAL[CHAT], "logit_bias": {"5": "x"}}, "logit_bias", None),
        (CHAT, {**MINIMAL[CHAT], "timeout": 0}, "timeout", None),
        (CHAT, {**MINIMAL[CHAT], "max_tokens": 2**31}, "max_tokens", None),
        (TEXT, {}, "prompt", "prompt is missing: give it, or prompt_embeds"),
        (TEXT, {"prompt": [1, -1]}, "prompt[1]", None),
        (TEXT, {"prompt": ["a", 1]}, "prompt[1]", None),
        (TEXT, {"prompt": {"a": 1}}, "prompt", None),
        (NATIVE, {**MINIMAL[NATIVE], "sampling_params": {"top_k": 1.5}}, None, None),
        (
            NATIVE,
            {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 1.5}]},
            "sampling_params[1].top_p",
            "sampling_params[1].top_p: expected float <= 1.0, got 1.5",
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type: invalid value 'xml', expected one of text, json_object, "
            "json_schema, structural_tag",
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "tools": [{"type": "custom"}]},
            "tools[0].type",
            "tools[0].type: invalid enum value 'custom', expected one of function",
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "tool_choice": "any"},
            "tool_choice",
            "tool_choice: invalid enum value 'any', expected one of none, auto, required",
        ),
        (
            TEXT,
            {**MINIMAL[TEXT], "truncation_side": "up"},
            "truncation_side",
            "truncation_side: invalid enum value 'up', expected one of left, right",
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "logit_bias": {"x": 1}},
            "logit_bias",
            "logit_bias: expected str matching regex '^[0-9]{1,10}$' as a key, got \"x\"",
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "logit_bias": {"4": 1, "5": 101}},
            "logit_bias",
            'logit_bias: expected float <= 100.0 for the key "5", got 101',
        ),
        (
            CHAT,
            {**MINIMAL[CHAT], "logit_bias": {"4": 1, "5": "no"}},
            "logit_bias",
            'logit_bias: expected float, got str for the key "5"',
        ),
        (
            CHAT,
            {
                **MINIMAL[CHAT],
                "tools": [{"type": "function", "function": {"name": "a b" + "c" * 60}}],
            },
            "tools[0].function.name",
            "tools[0].function.name: expected str matching regex '^[a-zA-Z0-9_.-]+$', got "
            '"a b' + "c" * 56 + "…",
        ),
    ],
)
async def test_wrong_types(path: str, body: Any, param: str | None, message: str | None) -> None:
    error = await refusal(path, body)
    assert error["param"] == (param or "sampling_params.top_k")
    if message is not None:
        assert error["message"] == message


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_p": 1.5}, "top_p"),
        (CHAT, {"frequency_penalty": 3}, "frequency_penalty"),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        (CHAT, {"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
        (TEXT, {"n": 0}, "n"),
        (TEXT, {"n": 129}, "n"),
        (TEXT, {"n": True}, "n"),
        (TEXT, {"best_of": 2, "n": 3}, "best_of"),
        (TEXT, {"best_of": 2, "stream": True}, "best_of"),
        (TEXT, {"best_of": 129}, "best_of"),
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (TEXT, {"logprob_token_ids": [1], "best_of": 2}, "logprob_token_ids"),
        (TEXT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (TEXT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (TEXT, {"truncation_side": "middle"}, "truncation_side"),
        (TEXT, {"min_tokens": 1, "regex": "a"}, "min_tokens"),
        (TEXT, {"vllm_xargs": {"a": 1}, "custom_params": {"a": 1}}, "custom_params"),
        (TEXT, {"regex": "a", "guided_json": {}}, "regex"),
        (TEXT, {"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (
            CHAT,
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ["x"] * 2049}, "prompt"),
        (NATIVE, {"sampling_params": {"sampling_seed": 2**64}}, "sampling_params.sampling_seed"),
        (NATIVE, {"input_ids": [1]}, "input_ids"),
        (NATIVE, {"text": None}, "text"),
        (NATIVE, {"text": None, "input_ids": [[1], 2]}, "input_ids"),
        (NATIVE, {"text": None, "input_ids": []}, "input_ids"),
        (NATIVE, {"text": ["a", "b"], "rid": ["1"]}, "rid"),
        (NATIVE, {"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
        (NATIVE, {"top_logprobs_num": 2}, "top_logprobs_num"),
    ],
)
async def test_wrong_values(path: str, fields: dict[str, Any], param: str) -> None:
    error = await refusal(path, {**MINIMAL[path], **fields})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'{"messages": \xff}',
        b'{"user": "\xff", "messages": [{"role": "u"}]}',
        b'{"user": "\\ud800"}',
        b'{"messages": [{"role": "u"}], "temperature": NaN}',
        b'{"messages": [{"role": "u"}], "temperature": 1e999}',
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_bodies_that_are_no_request(body: bytes) -> None:
    assert (await refusal(CHAT, body))["message"]


async def test_the_engines_refusal_names_the_clients_field() -> None:
    """Translate errors that only the engine can find, such as ids past the vocabulary."""

    async def refuse(call: Any) -> None:
        raise InvalidRequest("logprobs must be at most 5, got 20", param="logprobs")

    client = client_of(StubEngine(admit=refuse))
    for path, extra, param in (
        (CHAT, {"logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        (NATIVE, {"return_logprob": True, "top_logprobs_num": 20}, "top_logprobs_num"),
        (NATIVE, {"text": ["a", "b"]}, "top_logprobs_num"),
        (TEXT, {"logprobs": 20}, "logprobs"),
    ):
        for stream in (False, True):
            body = {**MINIMAL[path], **extra, "stream": stream}
            response = await client.post(path, json=body)
            assert response.status_code == 400
            error = json.loads(await response.get_data(True))["error"]
            assert error["param"] == param
            assert error["message"] == f"{param} must be at most 5, got 20"


def test_a_field_that_is_given_as_null_is_left_out() -> None:
    fields = {name: None for name in ChatCompletionRequest.__struct_fields__ if name != "messages"}
    request = parse_body(ChatCompletionRequest, json.dumps({**MINIMAL[CHAT], **fields}).encode())
    assert request == parse_body(ChatCompletionRequest, json.dumps(MINIMAL[CHAT]).encode())


async def test_a_whole_number_may_be_written_as_a_fraction() -> None:
    request = parse_body(
        GenerateRequest,
        b'{"input_ids": [5.0, 6e1], "timeout": 1.5, "sampling_params": {"max_new_tokens": 1e2}}',
    )
    assert request.input_ids == [5, 60]
    assert request.timeout == 1.5
    for body in (b'{"input_ids": [5.5]}', b'{"input_ids": [5.0, "6"]}', b'{"input_ids": [-5.0]}'):
        with pytest.raises(InvalidRequest):
            parse_body(GenerateRequest, body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [], "temperature": NaN}', "messages"),
        (b'{"messages": []', "messages"),
        (b'{"messages": [], "user": "\xff"}', "messages"),
        (b'{"messages": [], "messages": 5}', "messages"),
        (b'{"messages": [{"role": "user", "content": 5}], "messages": []}', "messages[0].content"),
        (b'{"messages": [], "x": ' + b"[" * 3000, "messages"),
    ],
)
async def test_what_follows_a_wrong_field_is_not_read_as_json(body: bytes, param: str) -> None:
    assert (await refusal(CHAT, body))["param"] == param
