"""The endpoints that tell what has happened since they were asked last."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from http_stub import server_config
from quart_trio.testing import TrioClient

from trioserve.engine import Engine
from trioserve.http import create_app
from trioserve.simulation import open_fake_engine
from trioserve.testing import FakeWorker


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Engine, TrioClient]]:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.002)) as engine:
        config = server_config(admin_api_key=["the-admin-key"])
        yield engine, create_app(engine, config).test_client()


async def asked(client: TrioClient, path: str) -> Any:
    response = await client.get(path, headers={"Authorization": "Bearer the-admin-key"})
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
        assert await asked(client, "/iteration_stats") == []
