"""Videos over HTTP: every API's form gives the answer that the engine gives."""

from __future__ import annotations

import base64
from typing import Any

import trio

from tests.support.http_stub import http_client, server_config
from tests.support.metric_samples import value
from tests.support.tiny_media import png
from tests.support.video_files import hostile_videos, video
from trioserve import Engine, VideoPart
from trioserve.http import create_app
from trioserve.http.server.server import serve_app

CHAT, NATIVE = "/v1/chat/completions", "/generate"
DATA = video(num_frames=17)
FILM = base64.b64encode(DATA).decode()
DATA_URL = f"data:video/mp4;base64,{FILM}"
NUM_TOKENS = 2 * 4
"""Tokens of two frames."""
TEXT = {"type": "text", "text": "What happens?"}
IMAGE = {"type": "image_url", "image_url": base64.b64encode(png(1)).decode()}
PROMPT = "user:<video> What happens?assistant:"
SAMPLING = {"max_new_tokens": 6, "temperature": 0}
FIRST = "messages[0].content[0]"


def chat(*content: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0}


def url(given: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": given}


def encoded(data: bytes) -> dict[str, Any]:
    return url({"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"})


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(url({"url": DATA_URL}), TEXT)),
    (CHAT, chat(url(FILM), TEXT)),
    (NATIVE, {"text": PROMPT, "video_data": DATA_URL, "sampling_params": SAMPLING}),
    (NATIVE, {"text": [PROMPT], "video_data": [[FILM]], "sampling_params": SAMPLING}),
]
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, chat(url("http://a/b")), FIRST, "--allowed-media-domains"),
    (CHAT, chat(TEXT, *[url(FILM)] * 3), "messages[0].content[3]", "--limit-mm-per-prompt"),
    (NATIVE, {"text": PROMPT, "video_data": ["x"]}, "video_data[0]", "base64"),
    (NATIVE, {"text": "none", "video_data": FILM}, "text", "once for each of its 1 videos"),
    (NATIVE, {"input_ids": [1], "video_data": "x"}, "video_data", "needs text"),
    *((CHAT, chat(encoded(data)), FIRST, "video") for data in hostile_videos().values()),
]


async def assert_served(engine: Engine) -> None:
    """Assert that an engine of SmolVLM that takes two frames of a video serves them."""

    def sample(name: str, **labels: str) -> float:
        return value(engine.metrics, name, model_name=engine.model_name, **labels)

    computed = sample("mm_encode_seconds_count")
    read = sample("mm_input_bytes_total", kind="video")
    messages = [{"role": "user", "content": [{"type": "video", "video": VideoPart(DATA)}, TEXT]}]
    expected = await engine.complete(messages, max_tokens=6, temperature=0)
    assert expected.usage.image_tokens == NUM_TOKENS
    config = server_config()
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(serve_app, create_app(engine, config), config)
        async with http_client(address) as client:
            for path, body in REQUESTS:
                response = await client.post(path, json=body)
                assert response.status_code == 200, (path, response.text)
                reply = response.json()
                if path == CHAT:
                    assert reply["choices"][0]["message"]["content"] == expected.text
                    details = reply["usage"]["prompt_tokens_details"]
                    assert details["image_tokens"] == NUM_TOKENS
                else:
                    (reply,) = reply if isinstance(reply, list) else [reply]
                    assert reply["text"] == expected.text
            # The same video was computed once.
            assert sample("mm_encode_seconds_count") == computed + 1
            assert sample("mm_input_bytes_total", kind="video") > read + 5 * len(DATA)
            for path, body, param, told in REFUSED:
                response = await client.post(path, json=body)
                assert response.status_code == 400, (path, response.text)
                error = response.json()["error"]
                assert error["param"] == param
                assert told in error["message"]
            mixed = await client.post(CHAT, json=chat(url(FILM), IMAGE, TEXT))
            details = mixed.json()["usage"]["prompt_tokens_details"]
            assert details["image_tokens"] > NUM_TOKENS
        nursery.cancel_scope.cancel()
