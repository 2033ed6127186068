"""Images over HTTP: every API's form gives the answer that the engine gives."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import trio

from tests.support.engines import open_tiny_engine
from tests.support.http_stub import http_client, server_config
from tests.support.tiny_media import image, make_media_model, png
from trioserve.http import create_app
from trioserve.http.server.server import serve_app

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
PICTURE = base64.b64encode(png(1)).decode()
DATA_URL = f"data:image/png;base64,{PICTURE}"
TEXT = {"type": "text", "text": "What is this?"}
URL = {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE}


def chat(*content: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0}


def said(reply: dict[str, Any]) -> str:
    """Return the text of any API's reply."""
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
    ("/tokenize", {"messages": chat(URL)["messages"]}, 400, "messages"),
]


async def test_every_api_reads_images(tmp_path: Path) -> None:
    folder = make_media_model("llava", tmp_path / "llava")
    async with open_tiny_engine(folder) as engine:
        content = [{"type": "image", "image": image(1)}, TEXT]
        expected = await engine.complete(
            [{"role": "user", "content": content}], max_tokens=6, temperature=0
        )
        assert expected.usage.cached_tokens == 0
        config = server_config()
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(serve_app, create_app(engine, config), config)
            async with http_client(url) as client:
                for path, body in REQUESTS:
                    response = await client.post(path, json={"model": "llava", **body})
                    assert response.status_code == 200, (path, response.text)
                    assert said(response.json()) == expected.text, path
                for path, body, status, param in REFUSED:
                    response = await client.post(path, json=body)
                    assert response.status_code == status, (path, response.text)
                    assert response.json()["error"]["param"].startswith(param)
            nursery.cancel_scope.cancel()
