"""Videos over HTTP: every API's form gives the answer that the engine gives."""

from __future__ import annotations

import base64
from typing import Any

from tests.engine.media_over_http import (
    CHAT,
    FIRST,
    NATIVE,
    SAMPLING,
    Posted,
    Refused,
    assert_answered,
    assert_refused,
    chat,
    serving,
)
from tests.support.metric_samples import value
from tests.support.tiny_media import png
from tests.support.video_files import hostile_videos, video
from trioserve import Engine, VideoPart

DATA = video(num_frames=17)
FILM = base64.b64encode(DATA).decode()
DATA_URL = f"data:video/mp4;base64,{FILM}"
NUM_TOKENS = 2 * 4
"""Tokens of two frames."""
TEXT = {"type": "text", "text": "What happens?"}
IMAGE = {"type": "image_url", "image_url": base64.b64encode(png(1)).decode()}
PROMPT = "user:<video> What happens?assistant:"


def url(given: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": given}


def encoded(data: bytes) -> dict[str, Any]:
    return url({"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"})


REQUESTS: list[Posted] = [
    (CHAT, chat(url({"url": DATA_URL}), TEXT)),
    (CHAT, chat(url(FILM), TEXT)),
    (NATIVE, {"text": PROMPT, "video_data": DATA_URL, "sampling_params": SAMPLING}),
    (NATIVE, {"text": [PROMPT], "video_data": [[FILM]], "sampling_params": SAMPLING}),
]
REFUSED: list[Refused] = [
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
    async with serving(engine) as client:
        await assert_answered(client, REQUESTS, expected.text, image_tokens=NUM_TOKENS)
        # The same video was computed once.
        assert sample("mm_encode_seconds_count") == computed + 1
        assert sample("mm_input_bytes_total", kind="video") > read + 5 * len(DATA)
        await assert_refused(client, REFUSED)
        mixed = await client.post(CHAT, json=chat(url(FILM), IMAGE, TEXT))
        details = mixed.json()["usage"]["prompt_tokens_details"]
        assert details["image_tokens"] > NUM_TOKENS
