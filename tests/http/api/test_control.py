"""The endpoints that control a running server, over a whole engine with a fake worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from quart_trio.testing import TrioClient

from tests.support.http_stub import server_config
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

ADMIN = {"Authorization": "Bearer the-admin-key"}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Engine, TrioClient]]:
    config = server_config(admin_api_key=["the-admin-key"])
    async with open_fake_engine(lambda: FakeWorker(step_time=0.002)) as engine:
        yield engine, create_app(engine, config).test_client()


async def control(client: TrioClient, path: str, body: Any = None, *, status: int = 200) -> Any:
    response = (
        await client.post(path, json=body, headers=ADMIN)
        if body is not None
        else (await client.post(path, headers=ADMIN))
    )
    data = json.loads(await response.get_data(True))
    assert response.status_code == status, data
    return data


async def generate(client: TrioClient, rid: str, tokens: int, **fields: Any) -> Any:
    body = {"text": "word", "rid": rid, "sampling_params": {"max_new_tokens": tokens}, **fields}
    response = await client.post("/generate", json=body)
    return response.status_code, json.loads(await response.get_data(True))


async def is_sleeping(client: TrioClient) -> bool:
    response = await client.get("/is_sleeping", headers=ADMIN)
    answer = json.loads(await response.get_data(True))
    assert list(answer) == ["is_sleeping"]
    return bool(answer["is_sleeping"])


async def until(condition: Any) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.001)


async def test_workers_are_listed() -> None:
    async with serving() as (engine, client):
        assert (await client.get("/workers")).status_code == 401
        await engine.complete("word", max_tokens=3)
        response = await client.get("/workers", headers=ADMIN)
        (worker,) = json.loads(await response.get_data(True))["workers"]
        assert (worker["index"], worker["state"], worker["restarts"]) == (0, "running", 0)
        assert worker["num_steps"] >= 3
        assert worker["pages_free"] <= worker["pages_total"] == 256
        assert worker["decode_ms"] > 0
        assert [each.state for each in engine.workers] == ["running"]


async def test_workers_are_added_and_removed() -> None:
    async with serving() as (engine, client):

        async def remove(index: str) -> tuple[int, Any]:
            response = await client.delete(f"/workers/{index}", headers=ADMIN)
            return response.status_code, json.loads(await response.get_data(True))

        status, answer = await remove("0")
        assert (status, answer["error"]["param"]) == (400, "index")
        body = json.dumps({"device": 3})
        headers = {**ADMIN, "Content-Type": "application/json"}
        refused = await client.post("/workers", data=body, headers=headers)
        assert refused.status_code == 400
        added = await control(client, "/workers", {"device": "cuda:1"})
        assert (added["index"], added["state"]) == (1, "running")
        assert (await generate(client, "one", 3))[0] == 200
        assert (await remove("0"))[0] == 200
        assert [each.index for each in engine.workers] == [1]
        assert (await generate(client, "two", 3))[0] == 200
        for wrong in ("x", "-1", "7", "9" * 40):
            status, answer = await remove(wrong)
            assert (status, answer["error"]["param"]) == (400, "index")
        assert (await client.delete("/workers/1")).status_code == 401


async def test_pause_and_continue() -> None:
    async with serving() as (engine, client):
        await control(client, "/pause_generation", {"mode": "in_place"})
        response = await client.get("/is_paused", headers=ADMIN)
        assert json.loads(await response.get_data(True)) == {"is_paused": True}
        results = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                results.append(await generate(client, "late", 3))

            nursery.start_soon(ask)
            await until(lambda: engine.statistics().scheduler.num_waiting == 1)
            await trio.sleep(0.02)
            assert results == []
            await control(client, "/continue_generation")
        ((status, answer),) = results
        assert status == 200
        assert answer["meta_info"]["completion_tokens"] == 3
        assert not engine.paused


async def test_pause_refuses_if_asked_to() -> None:
    async with serving() as (_, client):
        await control(client, "/pause_generation", {"new_requests": "refuse"})
        status, answer = await generate(client, "late", 3)
        assert (status, answer["error"]["code"]) == (503, "paused")
        health = await client.get("/health")
        assert health.status_code == 200  # The server is alive, so that it isn't restarted.
        await control(client, "/resume")
        assert (await generate(client, "late", 3))[0] == 200


async def test_pause_as_vllm_asks_for_it() -> None:
    async with serving() as (engine, client):
        await engine.complete([5] * 200, max_tokens=1)
        await control(client, "/pause?mode=keep&clear_cache=true")
        assert engine.paused
        await control(client, "/resume")
        await engine.complete([5] * 200, max_tokens=1)
        assert engine.statistics().scheduler.prefix_cache_hits == 0
        for query, param in (
            ("mode=never", "mode"),
            ("mode=keep&mode=wait", "mode"),
            ("clear_cache=2", "clear_cache"),
            ("level=1", "level"),
        ):
            answer = await control(client, f"/pause?{query}", status=400)
            assert answer["error"]["param"] == param
        assert not engine.paused


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": "mine"}),
        ("/abort_request", {"rid": "", "abort_all": True}),
        ("/abort_requests", {"request_ids": ["mine-1", "mine-2", "nobody's"]}),
        ("/pause_generation", {"mode": "abort"}),
    ],
)
async def test_requests_end_with_what_they_have(path: str, body: dict[str, Any]) -> None:
    async with serving() as (engine, client):
        results: dict[str, Any] = {}
        async with trio.open_nursery() as nursery:

            async def ask(rid: str) -> None:
                results[rid] = await generate(client, rid, 1_500)

            nursery.start_soon(ask, "mine-1")
            nursery.start_soon(ask, "mine-2")
            await until(lambda: engine.statistics().scheduler.num_running == 2)
            known = engine.statistics().scheduler.num_tokens_sampled
            await until(lambda: engine.statistics().scheduler.num_tokens_sampled > known + 4)
            reply = await control(client, path, body)
        assert reply.get("num_aborted", 2) == 2
        for status, answer in results.values():
            assert status == 200
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < answer["meta_info"]["completion_tokens"] < 1_500


async def test_openais_routes_are_ended_by_the_clients_own_id() -> None:
    async with serving() as (engine, client):
        results = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                body = {"prompt": ["a", "b"], "request_id": "order-66", "max_tokens": 1_500}
                response = await client.post("/v1/completions", json=body)
                results.append(json.loads(await response.get_data(True)))

            nursery.start_soon(ask)
            await until(lambda: engine.statistics().scheduler.num_running == 2)
            assert (await control(client, "/abort_request", {"rid": "order-6"}))["num_aborted"] == 2
        (answer,) = results
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]


async def test_an_empty_name_names_nobody() -> None:
    async with serving() as (engine, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, client, "mine", 1_500)
            await until(lambda: engine.statistics().scheduler.num_running == 1)
            assert (await control(client, "/abort_request", {}))["num_aborted"] == 0
            assert engine.statistics().scheduler.num_running == 1
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
async def test_flush(path: str) -> None:
    async with serving() as (engine, client):
        for _ in range(2):
            await engine.complete([5] * 200, max_tokens=1)
        hits = engine.statistics().scheduler.prefix_cache_hits
        assert hits > 0
        assert (await control(client, path))["num_pages_freed"] > 0
        await engine.complete([5] * 200, max_tokens=1)
        assert engine.statistics().scheduler.prefix_cache_hits == hits


async def test_mistakes_name_the_field() -> None:
    async with serving() as (_, client):
        for path, body, param in (
            ("/pause_generation", {"mode": "sometimes"}, "mode"),
            ("/abort_requests", {"request_ids": []}, "request_ids"),
            ("/flush_cache", {"hard": True}, "hard"),
            ("/sleep", {"mode": "abort"}, "mode"),
        ):
            answer = await control(client, path, body, status=400)
            assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("release", "body", "resume"),
    [
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, "/resume_memory"),
        ("/sleep?level=1&mode=keep", None, "/wake_up?tags=weights&tags=kv_cache"),
        ("/sleep", None, "/wake_up?tags=weights"),
    ],
)
async def test_memory_is_released_and_comes_back(release: str, body: Any, resume: str) -> None:
    async with serving() as (engine, client):
        assert not await is_sleeping(client)
        await control(client, release, body)
        assert await is_sleeping(client)
        assert not engine.healthy
        results: list[Any] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                results.append(await generate(client, "late", 3))

            nursery.start_soon(ask)
            await trio.sleep(0.05)
            assert results == []
            await control(client, resume)
        assert not await is_sleeping(client)
        assert [status for status, _ in results] == [200]
        assert engine.statistics().worker_restarts == 0
