"""Images over HTTP: every API's form gives the answer that the engine gives."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.media_over_http import CHAT, NATIVE, chat, serving
from tests.support.engines import open_tiny_engine
from tests.support.model_server import serving_folder
from tests.support.tiny_media import image, make_media_model, png

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
PICTURE = base64.b64encode(png(1)).decode()
DATA_URL = f"data:image/png;base64,{PICTURE}"
TEXT = {"type": "text", "text": "What is this?"}
URL = {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}
PROMPT = "user:<image> What is this?assistant:"
NATIVE_SAMPLING = {"max_new_tokens": 6, "temperature": 0}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE}


def said(reply: Any) -> str:
    """Return the text of any API's reply."""
    if isinstance(reply, list):
        (reply,) = reply
    if "meta_info" in reply:
        return reply["text"]
    if "choices" in reply:
        return reply["choices"][0]["message"]["content"]
    if "content" in reply:
        return reply["content"][0]["text"]
    if "output" in reply:
        return reply["output"][0]["content"][0]["text"]
    return reply["message"]["content"] if "message" in reply else reply["response"]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(URL, TEXT)),
    (CHAT, chat({"type": "image_url", "image_url": {"url": PICTURE}}, TEXT)),
    (
        MESSAGES,
        {"model": "llava", **chat({"type": "image", "source": SOURCE}, TEXT)},
    ),
    (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
                        {"type": "input_text", "text": TEXT["text"]},
                    ],
                }
            ],
            "max_output_tokens": 6,
            "temperature": 0,
        },
    ),
    (
        OLLAMA,
        {
            "model": "llava",
            "messages": [{"role": "user", "content": TEXT["text"], "images": [PICTURE]}],
            "stream": False,
            "options": {"num_predict": 6, "temperature": 0},
        },
    ),
    (NATIVE, {"text": PROMPT, "image_data": DATA_URL, "sampling_params": NATIVE_SAMPLING}),
    (NATIVE, {"text": PROMPT, "image_data": [PICTURE], "sampling_params": NATIVE_SAMPLING}),
    (
        NATIVE,
        {"text": [PROMPT], "image_data": [[PICTURE]], "sampling_params": NATIVE_SAMPLING},
    ),
    (
        GENERATE,
        {
            "model": "llava",
            "prompt": TEXT["text"],
            "images": [PICTURE],
            "stream": False,
            "options": {"num_predict": 6, "temperature": 0},
        },
    ),
]
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, chat(TEXT, {**URL, "image_url": "data:text/plain,x"}), 400, "messages[0].content[1]"),
    (CHAT, chat({**URL, "image_url": "http://127.0.0.1/x.png"}), 400, "messages[0].content[0]"),
    (CHAT, chat(*[URL] * 9), 400, "messages[0].content[8]"),
    (CHAT, {**chat(), "messages": [{"role": "system", "content": [URL]}]}, 400, "messages[0]"),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "Hi"},
                {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            ]
        },
        400,
        "input[1].content[0]",
    ),
    (NATIVE, {"text": "no place", "image_data": PICTURE}, 400, "text"),
    (NATIVE, {"text": "<image>" * 2, "image_data": PICTURE}, 400, "text"),
    (NATIVE, {"text": "<image>", "image_data": ["x"]}, 400, "image_data[0]"),
    (NATIVE, {"text": ["<image>"], "image_data": [["x"]]}, 400, "image_data[0][0]"),
    (NATIVE, {"text": ["<image>"] * 2, "image_data": ["x"]}, 400, "image_data"),
    (NATIVE, {"text": "<image>", "image_data": [["x"]]}, 400, "image_data"),
    (NATIVE, {"input_ids": [1], "image_data": "x"}, 400, "image_data"),
    ("/tokenize", {"messages": chat(URL)["messages"]}, 400, "messages"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_model("llava", tmp_path_factory.mktemp("models") / "llava")


async def test_every_api_reads_images(folder: Path) -> None:
    async with open_tiny_engine(folder) as engine:
        content = [{"type": "image", "image": image(1)}, TEXT]
        expected = await engine.complete(
            [{"role": "user", "content": content}], max_tokens=6, temperature=0
        )
        assert expected.usage.cached_tokens == 0
        async with serving(engine) as client:
            about = (await client.get("/model_info")).json()
            assert about["has_image_understanding"]
            for path, body in REQUESTS:
                named = body if path == NATIVE else {"model": "llava", **body}
                response = await client.post(path, json=named)
                assert response.status_code == 200, (path, response.text)
                assert said(response.json()) == expected.text, path
            for path, body, status, param in REFUSED:
                response = await client.post(path, json=body)
                assert response.status_code == status, (path, response.text)
                assert response.json()["error"]["param"].startswith(param)


def test_front_ends_read_images_and_share_their_embeddings(folder: Path) -> None:
    options = ("--api-server-count", "2", "--device", "cpu", "--num-gpu-blocks-override", "64")
    with serving_folder(folder, *options) as url:
        about = httpx.get(f"{url}/model_info", timeout=60).json()
        assert about["has_image_understanding"]
        answers = []
        for _ in range(6):
            # Each comes by a connection of its own, and any front end may accept it.
            reply = httpx.post(f"{url}{CHAT}", json=chat(URL, TEXT), timeout=60)
            assert reply.status_code == 200, reply.text
            answers.append(said(reply.json()))
        assert answers == answers[:1] * 6
        refused = httpx.post(f"{url}{CHAT}", json=chat({**URL, "image_url": "x"}), timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[0].content[0]"
        metrics = httpx.get(f"{url}/metrics", timeout=60).text

    def figure(name: str) -> float:
        found = re.findall(rf"^trioserve:{name}{{.*}} (.*)$", metrics, re.M)
        assert len(found) == 1
        return float(found[0])

    assert figure("mm_cache_queries_total") == 6
    assert figure("mm_cache_hits_total") == 5
    assert figure("mm_encode_seconds_count") == 1
