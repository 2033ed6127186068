"""The choice of a server for a request: by its cache, by load, and by sessions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.routed import Routed, open_routed
from tests.support.step_times import learn_long_steps
from trioserve.engine.routing.passed_over import PASSED_OVER
from trioserve.protocol import wire
from trioserve.testing import FakeWorker

TEXT = "a prompt of many pages, which begins as others do, and which is long enough " * 4
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"model": "fake", "messages": MESSAGES, "max_tokens": 2},
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 2}},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"model": "fake", "prompt": TEXT, "options": {"num_predict": 2}},
}


def slow() -> FakeWorker:
    """Return a worker whose prompts take so long that what a busy machine adds is little."""
    return FakeWorker(step_time=_seconds_of)


def _seconds_of(plan: wire.Plan) -> float:
    return 2e-3 + 3e-4 * int(wire.ints(plan.row_counts).sum())


async def warm(routed: Routed) -> None:
    """Have every server compute something, so that its times are known."""
    for each in routed.servers:
        await each.engine.complete("to warm up", max_tokens=3)


def choices(metrics: str) -> dict[str, int]:
    """Return the number of choices for each reason."""
    found = re.findall(r'choices_total{reason="(\w+)",.*} (\d+)\.0', metrics)
    total: Counter[str] = Counter()
    for reason, count in found:
        total[reason] += int(count)
    return dict(total)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_goes_where_it_is_cached(path: str, stream: bool) -> None:
    async with open_routed(3, slow) as routed, routed.client() as client:
        await warm(routed)
        before = routed.served()
        body = {**BODIES[path], "stream": stream}
        answers = []
        for _ in range(4):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            answers.append(response.text)
            await routed.wait_followed()
        counts = [now - then for now, then in zip(routed.served(), before, strict=True)]
        assert sorted(counts) == [0, 0, 4]
        metrics = (await client.get("/metrics")).text
        assert choices(metrics) == {"load": 1, "cached": 3}


async def test_prompts_at_once_with_a_new_prefix_go_to_one_server() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        await warm(routed)
        before = routed.served()

        async def ask(ending: str) -> None:
            body = {"prompt": TEXT + ending, "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

        async with trio.open_nursery() as nursery:
            for ending in "abc":
                nursery.start_soon(ask, ending)
                await trio.sleep(0.001)
        counts = [now - then for now, then in zip(routed.served(), before, strict=True)]
        assert sorted(counts) == [0, 3]


async def test_policies_by_name() -> None:
    async with (
        open_routed(2, slow, policy="round_robin") as routed,
        routed.client() as client,
    ):
        before = routed.served()
        for _ in range(4):
            await client.post("/v1/completions", json=BODIES["/v1/completions"])
        assert [now - then for now, then in zip(routed.served(), before, strict=True)] == [2, 2]


@pytest.mark.parametrize(("count", "policy"), [(1, "predicted"), (2, "least_loaded")])
async def test_requests_at_once_whose_pages_arent_asked_for(count: int, policy: str) -> None:
    async with open_routed(count, slow, policy=policy) as routed, routed.client() as client:

        async def ask() -> None:
            response = await client.post("/v1/completions", json=BODIES["/v1/completions"])
            assert response.status_code == 200

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)


async def test_a_busy_server_is_left_though_it_has_the_prefix() -> None:
    async with open_routed(2, lambda: FakeWorker(step_time=0.02), max_num_seqs=2) as routed:
        await warm(routed)
        async with routed.client() as client, trio.open_nursery() as nursery:
            body = {"prompt": TEXT, "max_tokens": 1}
            await client.post("/v1/completions", json=body)
            await routed.wait_followed()
            (has_it,) = [each for each in routed.servers if len(pages(each)) > 2]
            for number in range(8):
                nursery.start_soon(
                    lambda n=number: has_it.engine.complete(f"other {n}", max_tokens=200)
                )
            await trio.sleep(1.5)
            await client.post("/v1/completions", json=body)
            metrics = (await client.get("/metrics")).text
            assert choices(metrics) == {"load": 1, "quicker": 1}
            nursery.cancel_scope.cancel()


def pages(server: Any) -> list[Any]:
    return [node for each in server.engine.schedulers for node in each.core.memory.prefix.nodes()]


async def test_a_server_that_looks_slow_is_tried_again() -> None:
    async with open_routed(2, slow) as routed, routed.client() as client:
        await warm(routed)

        async def ask(count: int) -> int:
            """Return how many of so many requests, one after the other, the second server gets."""
            before = routed.served()[1]
            for number in range(count):
                body = {"prompt": f"{number} is a number", "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            return routed.served()[1] - before

        engine = routed.servers[1].engine
        (scheduler,) = engine.schedulers
        assert scheduler.core is not None
        learn_long_steps(scheduler.core.step_times)
        await engine.complete("to have a report", max_tokens=1)
        await routed.wait_followed()
        assert await ask(PASSED_OVER) == 0
        # It is chosen, and its steps show its true times.
        assert await ask(4 * PASSED_OVER) > 0


async def test_sessions_stay_where_they_were_opened() -> None:
    async with open_routed(3, slow) as routed, routed.client() as client:
        opened = await client.post("/open_session", json={"capacity_of_str_len": 1000})
        id = opened.json()
        before = routed.served()
        rid = None
        for turn in range(3):
            params = {"id": id, **({"rid": rid} if rid else {})}
            body = {
                "text": f"turn {turn}",
                "sampling_params": {"max_new_tokens": 2},
                "session_params": params,
            }
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            rid = answer.json()["meta_info"]["id"]
        counts = [now - then for now, then in zip(routed.served(), before, strict=True)]
        assert sorted(counts) == [0, 0, 3]
        assert (await client.post("/close_session", json={"session_id": id})).status_code == 200


async def test_kept_responses_are_found_again() -> None:
    async with open_routed(3, slow) as routed, routed.client() as client:
        body = {"input": "hello", "max_output_tokens": 2}
        ids = [(await client.post("/v1/responses", json=body)).json()["id"] for _ in range(3)]
        for id in ids:
            assert (await client.get(f"/v1/responses/{id}")).status_code == 200
            more = {**body, "previous_response_id": id}
            assert (await client.post("/v1/responses", json=more)).status_code == 200
        # One that this router hasn't seen is looked for.
        direct = routed.servers[2].address.url
        id = (await client.post(f"{direct}/v1/responses", json=body)).json()["id"]
        assert (await client.get(f"/v1/responses/{id}")).status_code == 200
        assert (await client.delete(f"/v1/responses/{id}")).status_code == 200
        assert (await client.get(f"/v1/responses/{id}")).status_code == 404


async def test_its_own_routes_and_those_of_one_server() -> None:
    async with open_routed(2) as routed, routed.client() as client:
        health = (await client.get("/health")).json()
        assert health["status"] == "ok"
        assert [each["up"] for each in health["servers"]] == [True, True]
        models = (await client.get("/v1/models")).json()
        assert [each["id"] for each in models["data"]] == ["fake"]
        assert (await client.get("/v1/models/fake")).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "ab"})).json()["count"] == 2
        for method, path in (
            ("POST", "/flush_cache"),
            ("GET", "/workers"),
            ("GET", "/kv_cache_events"),
            ("GET", "/console"),
            ("GET", "/server_info"),
        ):
            refused = await client.request(method, path)
            assert refused.status_code == 403, path
            assert "ask the server itself" in refused.text
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 405
        evil = await client.get("/v1/models", headers={"Host": "evil.example"})
        assert evil.status_code == 403


async def test_keys_are_the_servers_business() -> None:
    async with open_routed(2, api_key=("a-key",)) as routed, routed.client() as client:
        body = BODIES["/v1/chat/completions"]
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer a-key"}
        assert (
            await client.post("/v1/chat/completions", json=body, headers=headers)
        ).status_code == 200


async def test_a_wrong_request_is_refused_by_a_server() -> None:
    async with open_routed(2) as routed, routed.client() as client:
        before = routed.served()
        for path, body, param in (
            ("/v1/completions", {"prompt": TEXT, "n": -1}, "n"),
            ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}, "model"),
        ):
            refused = await client.post(path, json=body)
            assert refused.status_code in (400, 404)
            assert refused.json()["error"]["param"] == param
        too_large = b"x" * (33 << 20)
        refused = await client.post("/v1/completions", content=too_large)
        assert refused.status_code == 413
        assert routed.served() == before


async def test_the_workers_of_all_servers_are_compared() -> None:
    async with (
        open_routed(2, slow, data_parallel_size=2) as routed,
        routed.client() as client,
    ):
        prompts = [f"{number} {TEXT}" for number in range(4)]
        for prompt in prompts * 2:
            body = {"prompt": prompt, "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            await routed.wait_followed()
        num_pages = sum(len(pages(each)) for each in routed.servers)
        # Each prompt was computed once, and is cached by one worker.
        assert num_pages == sum(len(prompt) // 16 for prompt in prompts)
        used = {
            (index, worker)
            for index, upstream in enumerate(routed.upstreams)
            for worker, own in upstream.copied.pages.items()
            if own
        }
        assert len(used) > 1
        assert choices((await client.get("/metrics")).text) == {"load": 4, "cached": 4}


async def test_a_request_for_an_adapter_goes_where_it_is(tmp_path: Path) -> None:
    async with open_routed(2, slow, enable_lora=True) as routed, routed.client() as client:
        await routed.servers[1].engine.load_adapter("poet", tmp_path)
        with trio.fail_after(30):
            while "poet" not in routed.upstreams[1].models:
                await trio.sleep(0.01)
        models = (await client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in models] == ["fake", "poet"]
        before = routed.served()
        for _ in range(3):
            body = {"model": "poet", "prompt": TEXT, "max_tokens": 2}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        assert routed.served() == [before[0], before[1] + 3]
