"""The endpoints that tell what has happened since they were asked last."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import trio
from quart_trio.testing import TrioClient

from tests.support.http_stub import server_config
from trioserve.engine.cache_copy import CacheCopy
from trioserve.engine.cache_feed import CacheChanges
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.server.server import serve_app
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Engine, TrioClient]]:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.002)) as engine:
        config = server_config(admin_api_key=["the-admin-key"])
        yield engine, create_app(engine, config).test_client()


async def asked(client: TrioClient, path: str, method: str = "GET") -> Any:
    headers = {"Authorization": "Bearer the-admin-key"}
    response = await client.open(path, method=method, headers=headers)
    data = json.loads(await response.get_data(True))
    assert response.status_code == 200, data
    return data


async def test_iteration_stats() -> None:
    async with serving() as (engine, client):
        await engine.complete("abc", max_tokens=3)
        assert await asked(client, "/iteration_stats") == []
        await engine.complete("abcdef", max_tokens=3)
        stats = [
            each
            for each in await asked(client, "/iteration_stats")
            if each["inflightBatchingStats"]["numScheduledRequests"]
        ]
        first, second, third = stats
        assert first["iter"] < second["iter"] < third["iter"]
        assert first["inflightBatchingStats"] == {
            "numScheduledRequests": 1,
            "numContextRequests": 1,
            "numGenRequests": 0,
            "numPausedRequests": 0,
            "numCtxTokens": 6,
            "numGenTokens": 0,
        }
        assert third["inflightBatchingStats"]["numGenTokens"] == 1
        assert third["numCompletedRequests"] == 1
        assert first["numActiveRequests"] == 1
        assert first["iterLatencyMS"] == 2.0
        cache = first["kvCacheStats"]
        assert cache["freeNumBlocks"] + cache["usedNumBlocks"] == cache["maxNumBlocks"]
        assert engine.statistics().scheduler.num_steps >= third["iter"]
        # A step that only closes the slot may come later.
        later = [each["inflightBatchingStats"] for each in await asked(client, "/iteration_stats")]
        assert not any(each["numScheduledRequests"] for each in later)


async def generate(client: TrioClient, path: str, body: Any) -> Any:
    response = await client.post(path, json=body)
    return response.status_code, json.loads(await response.get_data(True))


PROMPTS = {
    "/generate": {"text": "a" * 40, "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a" * 40, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", PROMPTS)
async def test_kv_cache_retention_config(path: str) -> None:
    config = {
        "token_range_retention_configs": [
            {"token_start": 0, "token_end": 20, "priority": 80, "duration_ms": 60_000},
            {"token_start": 20, "priority": 10},
        ],
        "decode_retention_priority": 0,
        "decode_duration_ms": 5,
    }
    async with serving() as (engine, client):
        with engine.cache_events() as events:
            status, answer = await generate(
                client, path, {**PROMPTS[path], "kv_cache_retention_config": config}
            )
            assert status == 200, answer
            assert len(events.take()) >= 1
        pool = engine.schedulers[0]._core.memory.pool  # type: ignore[attr-defined]
        assert 80 in {pool.level(page) for page in pool.kept()}
        engine.check_integrity()


RANGES = "token_range_retention_configs"


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("config", "param"),
    [
        ({RANGES: [{"priority": 101}]}, f"{RANGES}[0].priority"),
        ({RANGES: [{"token_start": 0}]}, f"{RANGES}[0].priority"),
        ({RANGES: [{"token_start": -1, "priority": 1}]}, f"{RANGES}[0].token_start"),
        ({RANGES: [{"token_start": 4, "token_end": 4, "priority": 1}]}, f"{RANGES}[0].token_end"),
        ({RANGES: [{"priority": 1}, {"priority": 1}]}, f"{RANGES}[1].token_start"),
        ({RANGES: [{"priority": 1, "secondary": 2}]}, f"{RANGES}[0].secondary"),
        ({"decode_retention_priority": "35"}, "decode_retention_priority"),
        ({"decode_duration_ms": 10}, "decode_duration_ms"),
    ],
)
async def test_a_wrong_retention_is_named(path: str, config: Any, param: str) -> None:
    async with serving() as (_, client):
        body = {**PROMPTS[path], "kv_cache_retention_config": config}
        status, answer = await generate(client, path, body)
        assert status == 400
        assert answer["error"]["param"] == f"kv_cache_retention_config.{param}"


async def test_kv_cache_events() -> None:
    async with serving() as (engine, client):
        assert (await client.post("/kv_cache_events")).status_code in (401, 403)
        assert await asked(client, "/kv_cache_events", "POST") == []
        await engine.complete("a" * 40, max_tokens=1)
        first, second = await asked(client, "/kv_cache_events", "POST")
        (block,) = first["data"]["blocks"]
        assert first["data"]["type"] == "stored"
        assert first["data"]["parent_hash"] is None
        assert block["type"] == "stored_block"
        assert block["num_tokens"] == 16
        assert second["data"]["parent_hash"] == block["block_hash"]
        assert second["event_id"] == first["event_id"] + 1
        engine.flush_cache()
        events = await asked(client, "/kv_cache_events", "POST")
        kinds = [event["data"]["type"] for event in events]
        assert kinds == ["removed", "removed", "cleared"]


async def test_the_stream_begins_with_a_snapshot_and_ends_with_the_server() -> None:
    config = server_config(admin_api_key=["the-admin-key"], served_model_name=["mine"])
    shutdown = trio.Event()
    headers = {"Authorization": "Bearer the-admin-key"}
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        await engine.complete("a" * 40, max_tokens=1)

        async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
            app = create_app(engine, config)
            await serve_app(
                app, config, shutdown=shutdown, on_drain=engine.drain, task_status=task_status
            )

        (url,) = await nursery.start(serve)
        copied, kinds = CacheCopy(), []
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            assert (await client.get("/kv_cache_events")).status_code == 401
            assert (await client.head("/kv_cache_events", headers=headers)).status_code == 200
            async with client.stream("GET", "/kv_cache_events", headers=headers) as answer:
                async for line in answer.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        kinds.append(value)
                    elif value and kinds == ["server"]:
                        assert json.loads(value) == {"models": ["mine"], "page_size": 16}
                    elif value:
                        copied.apply(msgspec.json.decode(value, type=CacheChanges))
                        shutdown.set()
        assert len(copied.pages[0]) == 2
        assert set(kinds[1:]) == {"changes"}


async def test_a_draining_server_opens_no_stream() -> None:
    async with serving() as (engine, client):
        engine.drain()
        headers = {"Authorization": "Bearer the-admin-key"}
        assert (await client.get("/kv_cache_events", headers=headers)).status_code == 503
