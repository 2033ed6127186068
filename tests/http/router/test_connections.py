"""The connections to a server, which are kept from request to request."""

from __future__ import annotations

from collections import deque
from typing import Any

import trio

from tests.support.routed import open_routed
from trioserve.http.router import connections
from trioserve.http.router.upstream import Upstream
from trioserve.testing import FakeWorker

BODY: dict[str, Any] = {"prompt": "a prompt", "max_tokens": 2}


def idle(upstream: Upstream) -> deque[Any]:
    return upstream.connections._idle


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with open_routed(1) as routed, routed.client() as client:
        (upstream,) = routed.upstreams
        kept = []
        for stream in (False, True, False):
            answer = await client.post("/v1/completions", json={**BODY, "stream": stream})
            assert answer.status_code == 200
            kept += idle(upstream)
        assert len(set(map(id, kept))) == 1
        # The server closes it, which is found before it would be used.
        await routed.servers[0].kill()
        await routed.servers[0].start()
        await routed.wait_up()
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(idle(upstream)) == 1
        assert idle(upstream)[0] is not kept[0]


async def test_an_answer_that_wasnt_read_to_its_end_takes_its_connection_along() -> None:
    async with open_routed(1, lambda: FakeWorker(step_time=0.01)) as routed:
        body = {**BODY, "max_tokens": 500, "stream": True}
        async with routed.client() as client:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_bytes())
        (upstream,) = routed.upstreams
        with trio.fail_after(20):
            while routed.servers[0].engine.statistics().scheduler.num_running:
                await trio.sleep(0.005)
        assert not idle(upstream)


async def test_connections_are_closed_some_time_after_a_burst(monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "KEPT", 0.0)
    async with open_routed(1, lambda: FakeWorker(step_time=0.01)) as routed:
        (upstream,) = routed.upstreams
        async with routed.client() as client, trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(lambda: client.post("/v1/completions", json=BODY))
        assert idle(upstream)
        async with routed.client() as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(idle(upstream)) == 1
