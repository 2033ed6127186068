"""Servers that die, drain, lie about their caches, and clients that leave."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio

from tests.support.http_stub import connect, raw_request, read_until
from tests.support.routed import ADMIN_KEY, Routed, open_routed
from trioserve.engine.cache_copy import CacheCopy
from trioserve.http.router import app as router_app
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import byte_tokenizer

PROMPT = "a prompt of several pages, which begins as others do " * 3
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2}
LETTER = byte_tokenizer().token_to_id("a")


def slow() -> FakeWorker:
    return FakeWorker(token=lambda *_: LETTER, step_time=0.01)


async def until_running(routed: Routed, number: int) -> None:
    """Wait until that many sequences run on all servers together."""
    with trio.fail_after(30):
        while number != sum(
            each.engine.statistics().scheduler.num_running for each in routed.servers
        ):
            await trio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_at_the_server(stream: bool) -> None:
    async with open_routed(2, slow) as routed:
        async with routed.client() as client, trio.open_nursery() as nursery:
            body = {**BODY, "max_tokens": 1000, "stream": stream}

            async def ask() -> None:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_bytes():
                        pass

            nursery.start_soon(ask)
            await until_running(routed, 1)
            nursery.cancel_scope.cancel()
        await until_running(routed, 0)
        for each in routed.servers:
            each.engine.check_integrity()
        async with routed.client() as client:
            assert 'status="499"' in (await client.get("/metrics")).text


async def test_a_server_that_cant_be_reached_is_replaced_and_comes_back() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        for _ in range(2):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        await routed.servers[0].kill()
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        await routed.wait_up(False, True)
        health = (await client.get("/health")).json()
        assert health["status"] == "ok"
        assert health["servers"][0]["reason"]
        await routed.servers[1].kill()
        await routed.wait_up(False, False)
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_server"
        assert (await client.get("/health")).status_code == 503
        await routed.servers[0].start()
        await routed.wait_up(True, False)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_server_whose_worker_is_away_gets_nothing() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        await routed.servers[0].engine.release_memory()
        await routed.wait_up(False, True)
        before = routed.served()
        for _ in range(3):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert routed.served() == [before[0], before[1] + 3]
        await routed.servers[0].engine.resume_memory()
        await routed.wait_up()


async def test_a_draining_server_is_out_and_ends_its_streams() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        async with client.stream(
            "POST", "/v1/completions", json={**BODY, "max_tokens": 60, "stream": True}
        ) as response:
            await until_running(routed, 1)
            (one,) = [
                each for each in routed.servers if each.engine.statistics().scheduler.num_running
            ]
            one.shutdown.set()
            index = routed.servers.index(one)
            for _ in range(3):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            await routed.wait_up(index != 0, index != 1)
            data = await response.aread()
        assert data.endswith(b"data: [DONE]\n\n")
        assert b"error" not in data


async def test_slow_uploads_make_way_for_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_app, "BODY_ROOM", 3000)
    body = json.dumps(BODY).encode().ljust(1000)
    request = raw_request(body, path="/v1/completions")
    refused, full = 0, trio.Event()

    async def upload(url: str) -> None:
        nonlocal refused
        async with await connect(url) as client:
            await client.send_all(request[:-1])
            assert b"HTTP/1.1 429" in await read_until(client, b"makes way")
            refused += 1
            full.set()

    async with open_routed(1, router_options={"max_body_size": 1000}) as routed:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(upload, routed.url)
                await full.wait()
                # Three of them fill the room.
                async with await connect(routed.url) as client:
                    await client.send_all(request)
                    assert b"HTTP/1.1 200" in await read_until(client, b'"choices"')
                while refused < 2:
                    await trio.sleep(0.005)
                nursery.cancel_scope.cancel()


STREAMS: dict[str, tuple[Any, bytes]] = {
    "/v1/completions": (
        {"prompt": PROMPT, "max_tokens": 500},
        b'data: {"error":{"message":"the server was lost',
    ),
    "/v1/messages": (
        {
            "model": "fake",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 500,
        },
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"the ',
    ),
    "/v1/responses": (
        {"input": PROMPT, "max_output_tokens": 500},
        b'event: error\ndata: {"type":"error","code":"server_lost"',
    ),
    "/api/generate": (
        {"model": "fake", "prompt": PROMPT, "options": {"num_predict": 500}},
        b'{"error":"the server was lost',
    ),
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_ends_with_an_error_if_its_server_dies(path: str) -> None:
    body, expected = STREAMS[path]
    async with open_routed(2, slow) as routed, routed.client() as client:
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            await until_running(routed, 1)
            parts = response.aiter_bytes()
            data = await anext(parts)
            for each in routed.servers:
                await each.kill()
            data += b"".join([part async for part in parts])
        assert expected in data.split(b"\n\n")[-2 if path.startswith("/v1") else -1]


async def test_an_answer_that_isnt_a_stream_is_computed_elsewhere() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            body = {**BODY, "max_tokens": 100}
            answers.append(await client.post("/v1/completions", json=body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until_running(routed, 1)
            (one,) = [
                each for each in routed.servers if each.engine.statistics().scheduler.num_running
            ]
            await one.kill()
        assert answers[0].status_code == 200, answers[0].text
        assert len(answers[0].json()["choices"][0]["text"]) == 100
        assert "retries_total{" in (await client.get("/metrics")).text


async def test_a_gap_is_noticed_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        apply, lost = CacheCopy.apply, []

        def losing(copied: CacheCopy, changes: Any) -> None:
            if changes.events and not lost:
                lost.append(changes)
                return
            apply(copied, changes)

        monkeypatch.setattr(CacheCopy, "apply", losing)
        for server in routed.servers:
            await server.engine.complete(PROMPT, max_tokens=3)
        with trio.fail_after(30):
            while not lost:
                await trio.sleep(0.005)
        await routed.wait_followed()
        metrics = (await client.get("/metrics")).text
        assert sum("feed_gaps_total{" in line for line in metrics.splitlines()) == 1
        assert [each.is_up for each in routed.upstreams] == [True, True]


async def test_a_stale_picture_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        first = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        await routed.wait_followed()
        monkeypatch.setattr(CacheCopy, "apply", lambda copied, changes: None)
        for server in routed.servers:
            server.engine.flush_cache()
        again = await client.post("/v1/completions", json=BODY)
        assert again.status_code == 200
        assert again.json()["choices"][0]["text"] == first
        assert 'reason="cached"' in (await client.get("/metrics")).text


async def test_without_a_prompts_pages_it_is_routed_by_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        monkeypatch.setattr(router_app, "ASK_TIMEOUT", 0.0)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert 'reason="load"' in (await client.get("/metrics")).text


async def test_a_server_with_another_admin_key_is_out() -> None:
    keys = (ADMIN_KEY, "another")
    async with open_routed(2, keys=keys, up=(True, False)) as routed, routed.client() as client:
        reason = (await client.get("/health")).json()["servers"][1]["reason"]
        assert "refuses with 401" in reason


async def test_the_router_drains() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        body = {**BODY, "max_tokens": 50, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await until_running(routed, 1)
            routed.shutdown.set()
            data = await response.aread()
        assert data.endswith(b"data: [DONE]\n\n")
        assert routed.num_cut == [0]


async def test_requests_that_outlast_the_drain_are_cut_with_an_error() -> None:
    async with (
        open_routed(2, slow, router_options={"shutdown_timeout": 0.2}) as routed,
        routed.client() as client,
    ):
        body = {**BODY, "max_tokens": 1000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await until_running(routed, 1)
            routed.shutdown.set()
            data = await response.aread()
        last = data.split(b"data: ")[-1]
        assert json.loads(last)["error"]["code"] == "shutting_down"
        await until_running(routed, 0)
