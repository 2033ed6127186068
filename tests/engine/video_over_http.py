"""Videos over HTTP: every API's form gives the answer that the engine gives."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import httpx

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

RESPONSES = "/v1/responses"
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
WHOLE: dict[str, Any] = {"mm_processor_kwargs": {"do_image_splitting": False}}
ONE_FRAME: dict[str, Any] = {"media_io_kwargs": {"video": {"num_frames": 1}}}
INPUT = {
    "role": "user",
    "content": [
        {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE['image_url']}"}
    ],
}


def with_arguments(given: Any, field: str = "mm_processor_kwargs") -> Posted:
    return CHAT, {**chat(IMAGE, TEXT), field: given}


REFUSED_ARGUMENTS: list[Refused] = [
    (*with_arguments(given), "mm_processor_kwargs", told)
    for given, told in (
        ({"nonsense": 1}, "mm_processor_kwargs has nonsense; the model's processor takes "),
        ({"device": "cuda"}, "mm_processor_kwargs has device; "),
        ({"do_resize": "http://a/"}, f"{FIRST}: mm_processor_kwargs has a wrong value: "),
        ({"resample": 99}, "refuses the image with mm_processor_kwargs (resample): "),
        ({"max_image_size": {"longest_edge": 16}}, "the model takes pixel_values as float32 "),
        ({"size": [[[[1]]]]}, "at most 4 levels are read"),
        ([1], "object"),
        ({str(number): 1 for number in range(65)}, "64"),
    )
] + [
    (*with_arguments({"size": {"longest_edge": 2048}}), FIRST, "maximum context length"),
    (*with_arguments({"image": {}}, "media_io_kwargs"), "media_io_kwargs", "it takes video"),
    (CHAT, {**chat(TEXT), "mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs", "has x; "),
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
        await assert_arguments_count(client, sample)


async def assert_arguments_count(client: httpx.AsyncClient, sample: Callable[[str], float]) -> None:
    """Assert that arguments of a request change its own tokens, and that wrong ones are refused."""

    async def tokens_of(path: str, body: dict[str, Any]) -> tuple[int, float]:
        """Return the tokens of images, and how many media were computed."""
        before = sample("mm_encode_seconds_count")
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        count = details.get("image_tokens", 0) if path == CHAT else usage["input_tokens"]
        return count, sample("mm_encode_seconds_count") - before

    split, _ = await tokens_of(CHAT, chat(IMAGE, TEXT))
    assert await tokens_of(CHAT, {**chat(IMAGE, TEXT), "mm_processor_kwargs": {}}) == (split, 0)
    assert await tokens_of(CHAT, {**chat(IMAGE, TEXT), **WHOLE}) == (4, 1)
    assert await tokens_of(CHAT, {**chat(IMAGE, TEXT), **WHOLE}) == (4, 0)
    assert await tokens_of(CHAT, chat(IMAGE, TEXT)) == (split, 0)
    assert await tokens_of(CHAT, {**chat(url(FILM), TEXT), **ONE_FRAME}) == (4, 1)
    assert await tokens_of(CHAT, {**chat(TEXT), **WHOLE, **ONE_FRAME}) == (0, 0)
    asked = {"input": [INPUT], "max_output_tokens": 1}
    whole, _ = await tokens_of(RESPONSES, {**asked, **WHOLE})
    assert (await tokens_of(RESPONSES, asked))[0] - whole > split - 4
    await assert_refused(client, REFUSED_ARGUMENTS)
    tokenize = {"messages": chat(TEXT)["messages"], **WHOLE}
    await assert_refused(client, [("/tokenize", tokenize, "mm_processor_kwargs", "isn't served")])
