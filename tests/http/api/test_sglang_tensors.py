"""Hidden states and logits in SGLang's /generate."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import trio

from tests.support.http_stub import server_config
from trioserve import Engine
from trioserve.http import create_app
from trioserve.testing.fake_engine import open_fake_engine

TEXT = "a prompt that fills a page or two"
EVERYTHING: dict[str, Any] = {
    "return_hidden_states": "all",
    "return_context_logits": True,
    "return_generation_logits": True,
}


async def post(engine: Engine, body: dict[str, Any]) -> Any:
    client = create_app(engine, server_config(engine=engine.config)).test_client()
    response = await client.post("/generate", json=body)
    data = await response.get_data(True)
    if not body.get("stream"):
        return json.loads(data)
    *parts, done, rest = data.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def arrays(reply: Any) -> dict[str, Any]:
    return safetensors.numpy.load(base64.b64decode(reply["meta_info"]["output_tensors"]))


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, rows in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], rows, err_msg=name)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_the_engines(
    stream: bool, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:  # Encoded in a thread.
        monkeypatch.setattr("trioserve.http.api.threads.TENSOR_BYTES", 1)
        monkeypatch.setattr("trioserve.http.api.sse.TENSOR_BYTES", 1)
    async with open_fake_engine() as engine:
        wanted = await engine.complete(TEXT, n=2, max_tokens=3, seed=1, **EVERYTHING)
        sampling = {"n": 2, "max_new_tokens": 3, "sampling_seed": 1}
        body = {"text": TEXT, "sampling_params": sampling, "stream": stream, **EVERYTHING}
        replies = await post(engine, body)
        if stream:
            assert any("output_tensors" not in each["meta_info"] for each in replies)
            replies = [each for each in replies if "output_tensors" in each["meta_info"]]
    first, second = sorted(replies, key=lambda each: each["index"])
    assert_same(arrays(first), {**wanted.tensors, **wanted.outputs[0].tensors})
    assert_same(arrays(second), wanted.outputs[1].tensors)
    assert arrays(first)["context_logits"].shape == (len(TEXT), 256)
    assert arrays(second)["generation_logits"].shape == (3, 256)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (True, {"prompt_hidden_states", "hidden_states"}),
        ("all", {"prompt_hidden_states", "hidden_states"}),
        ("last", {"hidden_states"}),
    ],
)
async def test_words_for_hidden_states(asked: Any, names: set[str]) -> None:
    async with open_fake_engine() as engine:
        sampling = {"max_new_tokens": 3}
        body = {"text": TEXT, "sampling_params": sampling, "return_hidden_states": asked}
        assert arrays(await post(engine, body)).keys() == names
        body |= {"text": [TEXT, TEXT], "return_hidden_states": [False, asked]}
        plain, reply = await post(engine, body)
    assert "output_tensors" not in plain["meta_info"]
    assert arrays(reply).keys() == names


async def test_only_new_output_has_them_at_its_end() -> None:
    async with open_fake_engine() as engine:
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        body = {"text": TEXT, "sampling_params": sampling, "stream": True, "stream_output": True}
        replies = await post(engine, {**body, "return_hidden_states": "last"})
    assert ["output_tensors" in each["meta_info"] for each in replies].count(True) == 1
    assert arrays(replies[-1])["hidden_states"].shape == (4, 2)


async def test_too_many_bytes_are_refused_before_anything_is_computed() -> None:
    rows = len(TEXT) + 4
    async with open_fake_engine(max_output_tensor_bytes=rows * 1024 - 1) as engine:
        body = {
            "text": TEXT,
            "sampling_params": {"max_new_tokens": 4},
            "return_context_logits": True,
            "return_generation_logits": True,
        }
        refused = (await post(engine, body))["error"]
        assert refused["param"] == "return_context_logits"
        assert refused["message"] == (
            f"return_context_logits asks for up to {len(TEXT) * 1024} bytes of arrays, "
            f"{rows * 1024} with return_generation_logits: at most {rows * 1024 - 1} are returned "
            "(--max-output-tensor-bytes)"
        )
        body["return_generation_logits"] = False
        refused = (await post(engine, {**body, "text": [TEXT, TEXT]}))["error"]
        assert refused["param"] == "return_context_logits"
        assert f"up to {2 * len(TEXT) * 1024} bytes of arrays for all prompts" in refused["message"]
        with trio.fail_after(5):
            while not engine.idle:
                await trio.sleep(0.01)
        assert engine.statistics().scheduler.num_tokens_sampled <= 2
        assert "output_tensors" in (await post(engine, body))["meta_info"]
