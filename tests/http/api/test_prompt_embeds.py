"""Embeddings in a body: each form gives the same answer, and what can't be read is refused."""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from tests.support.http_stub import serving_fake_engine
from trioserve.http.api.prompt_embeds import decode_embeddings
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddingsPrompt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROWS = np.arange(80, dtype=np.float32).reshape(20, 4) / 8


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def numpy_form(rows: npt.NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, rows)
    return stream.getvalue()


FORMS = [
    save({"prompt_embeds": ROWS}),
    save({"x": ROWS.astype(np.float64)}),
    numpy_form(ROWS),
    numpy_form(np.asfortranarray(ROWS)),
    numpy_form(ROWS.astype(">f8")),
]


async def test_every_form_gives_the_same_answer() -> None:
    async with serving_fake_engine() as (engine, client):
        fields = {"max_tokens": 8, "seed": 3}
        expected = await engine.complete(EmbeddingsPrompt(ROWS), **fields)
        for data in FORMS:
            body = {"prompt_embeds": text_of(data), "prompt": "", **fields}
            response = await client.post(COMPLETIONS, json=body)
            assert response.status_code == 200, response.text
            reply = response.json()
            assert reply["choices"][0]["text"] == expected.text
            assert reply["usage"]["prompt_tokens"] == 20
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_numbers_stay_as_they_are(dtype: Any) -> None:
    rows = ROWS.astype(dtype)
    name = "BF16" if dtype is ml_dtypes.bfloat16 else "F16"
    data = save({"x": rows.view(np.uint16)}).replace(b'"U16"', f'"{name}"'.encode())
    # The header's length is in its first bytes, so the name's has to be made up for.
    data = data if len(name) == 3 else _longer(data)
    prompt = decode_embeddings(text_of(data), "x")
    assert prompt.embeddings.dtype == rows.dtype
    assert np.array_equal(prompt.embeddings, rows)


def _longer(data: bytes) -> bytes:
    return (int.from_bytes(data[:8], "little") + 1).to_bytes(8, "little") + data[8:]


async def test_several_prompts_and_a_text() -> None:
    async with serving_fake_engine() as (engine, client):
        body = {
            "prompt_embeds": [text_of(FORMS[0]), text_of(save({"x": ROWS[:5]}))],
            "prompt": "text",
            "max_tokens": 5,
            "seed": 1,
        }
        reply = (await client.post(COMPLETIONS, json=body)).json()
        expected = [
            (await engine.complete(prompt, max_tokens=5, seed=1)).text
            for prompt in (EmbeddingsPrompt(ROWS), EmbeddingsPrompt(ROWS[:5]), "text")
        ]
        assert [choice["text"] for choice in reply["choices"]] == expected


async def test_a_part_of_a_chat() -> None:
    async with serving_fake_engine() as (engine, client):
        embedded = {"type": "prompt_embeds", "prompt_embeds": text_of(FORMS[0])}
        content = [{"type": "text", "text": "a"}, embedded, {"type": "text", "text": "b"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "seed": 2}
        reply = (await client.post(CHAT, json=body)).json()
        content[1] = {"type": "prompt_embeds", "prompt_embeds": ROWS}
        expected = await engine.complete(body["messages"], max_tokens=6, seed=2)
        assert reply["choices"][0]["message"]["content"] == expected.text
        assert reply["usage"]["prompt_tokens"] == expected.usage.prompt_tokens > 20

        body["messages"][0]["role"] = "system"
        content[1] = embedded
        error = (await client.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "messages[0].content[1]"
        response = await client.post("/tokenize", json={"messages": body["messages"]})
        assert response.status_code == 400


REFUSED = [
    ("not base64!", "isn't base64"),
    (text_of(pickle.dumps(ROWS)), "is a pickle"),
    (text_of(b"PK\x03\x04 what torch.save writes"), "is a pickle"),
    (text_of(b"anything"), "neither safetensors nor NumPy's format"),
    (text_of(save({"a": ROWS, "b": ROWS})), "it has 2 tensors"),
    (text_of(save({"a": ROWS.astype(np.int32)})), "its numbers are I32"),
    (text_of(save({"a": np.full((2, 4), np.nan, np.float32)})), "aren't finite"),
    (text_of(save({"a": ROWS[0]})), "not of the shape [4]"),
    (text_of(numpy_form(ROWS)[:-1]), "it has 319 bytes"),
    (text_of(numpy_form(ROWS.astype(np.int8))), "its numbers are int8"),
    (text_of(numpy_form(np.array([None]))[:128]), "its numbers are object"),
]


async def test_refusals() -> None:
    async with serving_fake_engine() as (engine, client):
        for given_text, told in REFUSED:
            body: dict[str, Any] = {"prompt_embeds": [given_text], "max_tokens": 1}
            response = await client.post(COMPLETIONS, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "prompt_embeds[0]")
            assert told in error["message"]
        wide = text_of(save({"a": np.zeros((2, 5), np.float32)}))
        for fields, param in (
            ({"prompt_embeds": wide}, "prompt_embeds"),
            ({"prompt_embeds": text_of(FORMS[0]), "echo": True}, "echo"),
            ({}, "prompt"),
        ):
            response = await client.post(COMPLETIONS, json={**fields, "max_tokens": 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert engine.statistics().scheduler.num_steps == 0


@given(st.binary(max_size=200))
@example(numpy_form(ROWS)[:80])
@example(b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{")
@example(b"\x93NUMPY\x03\x00\x04\x00\x00\x00\xff\xff\xff\xff")
@example(b"\x93NUMPY\x09\x00\x04\x00")
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        decode_embeddings(text_of(data), "prompt_embeds")
