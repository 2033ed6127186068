"""Audio over HTTP: every API's form gives the answer that the engine gives."""

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
from tests.support.tiny_audio import TOKENS
from tests.support.tiny_media import png
from tests.support.tiny_speech import wav
from trioserve import AudioPart, Engine

SPEECH = base64.b64encode(wav(9, 0.2)).decode()
PICTURE = base64.b64encode(png(1)).decode()
DATA_URL = f"data:audio/wav;base64,{SPEECH}"
NUM_TOKENS = 5
"""Tokens that stand for a fifth of a second."""
TEXT = {"type": "text", "text": "What is said?"}
CLIP = {"type": "input_audio", "input_audio": {"data": SPEECH, "format": "wav"}}
PROMPT = f"user:{TOKENS['qwen2_audio']} What is said?assistant:"


def url(place: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": place}


REQUESTS: list[Posted] = [
    (CHAT, chat(CLIP, TEXT)),
    (CHAT, chat(url({"url": DATA_URL}), TEXT)),
    (CHAT, chat(url(SPEECH), TEXT)),
    (NATIVE, {"text": PROMPT, "audio_data": DATA_URL, "sampling_params": SAMPLING}),
    (NATIVE, {"text": [PROMPT], "audio_data": [[SPEECH]], "sampling_params": SAMPLING}),
]
REFUSED: list[Refused] = [
    (CHAT, chat({"type": "image_url", "image_url": PICTURE}), FIRST, "reads no images"),
    (CHAT, chat(url("http://a/b")), FIRST, "--allowed-media-domains"),
    (CHAT, chat(TEXT, CLIP, CLIP, CLIP), "messages[0].content[3]", "--limit-mm-per-prompt"),
    (CHAT, chat(CLIP, role="system"), FIRST, "served in messages of the role user"),
    (NATIVE, {"text": PROMPT, "image_data": PICTURE}, "image_data", "reads no images"),
    (NATIVE, {"text": PROMPT, "audio_data": ["x"]}, "audio_data[0]", "base64"),
    (NATIVE, {"text": "none", "audio_data": SPEECH}, "text", "once for each of its 1 audio clips"),
    (NATIVE, {"input_ids": [1], "audio_data": "x"}, "audio_data", "needs text"),
]


async def assert_served(engine: Engine) -> None:
    """Assert that an engine of Qwen2-Audio, with at most two clips in a prompt, serves them."""
    name, model = "mm_encode_seconds_count", engine.model_name
    computed = value(engine.metrics, name, model_name=model)
    content = [{"type": "audio", "audio": AudioPart(wav(9, 0.2))}, TEXT]
    messages = [{"role": "user", "content": content}]
    expected = await engine.complete(messages, max_tokens=6, temperature=0)
    assert expected.usage.audio_tokens == NUM_TOKENS
    async with serving(engine) as client:
        about = (await client.get("/model_info")).json()
        assert about["has_audio_understanding"]
        assert not about["has_image_understanding"]
        await assert_answered(client, REQUESTS, expected.text, audio_tokens=NUM_TOKENS)
        await assert_refused(client, REFUSED)
    # The same clip was computed once.
    assert value(engine.metrics, name, model_name=model) == computed + 1
