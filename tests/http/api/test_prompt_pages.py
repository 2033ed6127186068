"""The pages of a prompt, told instead of an answer: those that the request then finds."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest

from tests.support.http_stub import server_config
from trioserve.http import create_app
from trioserve.http.api.prompt_pages import HEADER, PromptPagesReply
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.testing.fake_engine import open_fake_engine

TEXT = "a prompt of three pages or some more, which begins as others do: " + "x" * 20
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "cache_salt": "mine"},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"model": "fake", "messages": MESSAGES, "max_tokens": 2},
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 2}},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"model": "fake", "prompt": TEXT, "options": {"num_predict": 2}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_they_are_those_that_are_stored(path: str, stream: bool) -> None:
    async with open_fake_engine(max_model_len=256) as engine:
        client = create_app(engine, server_config()).test_client()
        body = {**BODIES[path], "stream": stream}
        with engine.cache_events() as events:
            response = await client.post(path, json=body, headers={HEADER: "1"})
            data = await response.get_data(False)
            assert response.status_code == 200, data
            assert not engine.statistics().scheduler.num_steps
            reply = msgspec.json.decode(data, type=PromptPagesReply)
            response = await client.post(path, json=body)
            await response.get_data(False)
            assert response.status_code == 200
            stored: list[CacheEvent] = events.take()
    (prompt,) = reply.prompts
    hashes = list(array("Q", prompt.hashes))
    assert reply.page_size == 16
    assert len(hashes) == (prompt.num_tokens - 1) // 16
    assert hashes == [each.hash for each in stored][: len(hashes)]


async def test_several_prompts_have_pages_each() -> None:
    async with open_fake_engine() as engine:
        client = create_app(engine, server_config()).test_client()
        body = {"prompt": [TEXT, "short", TEXT * 50], "max_tokens": 1}
        response = await client.post("/v1/completions", json=body, headers={HEADER: "1"})
        data = json.loads(await response.get_data(True))
    assert [each["num_tokens"] for each in data["prompts"]] == [len(TEXT), 5, 50 * len(TEXT)]
    assert data["prompts"][1]["hashes"] == ""


async def test_a_wrong_request_is_refused_as_ever() -> None:
    async with open_fake_engine() as engine:
        client = create_app(engine, server_config()).test_client()
        for body, param in (({"prompt": TEXT, "n": -1}, "n"), ({"prompt": "", "n": 1}, "prompt")):
            response = await client.post("/v1/completions", json=body, headers={HEADER: "1"})
            assert response.status_code == 400
            assert json.loads(await response.get_data(True))["error"]["param"] == param
