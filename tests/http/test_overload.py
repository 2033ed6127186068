"""Far more requests than can be computed: the admitted keep their latency, the others are told."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import trio
import trio.testing

from tests.support.asgi_client import Answer, ask
from tests.support.http_stub import http_client, server_config
from trioserve import Engine, QueueFull
from trioserve.http import create_app
from trioserve.http.server.server import serve_app
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock

RUNNING, WAITING = 8, 16
REQUEST_SECONDS = 1.0
"""8 requests run at a time, so 8 can be served in a second."""
ARRIVALS = 160
"""In a second: 20 times as many."""
SECONDS = 20


class Flood:
    """Requests that come evenly, and what became of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.latencies: list[float] = []
        self.refusals: list[float] = []
        self.hints: Counter[float] = Counter()
        self.most_open = 0

    async def request(self) -> None:
        started = trio.current_time()
        try:
            await self._engine.complete([1] * 20, max_tokens=10, ignore_eos=True)
        except QueueFull as full:
            self.refusals.append(trio.current_time() - started)
            self.hints[full.retry_after] += 1
        else:
            self.latencies.append(trio.current_time() - started)

    async def run(self, seconds: int) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(seconds * ARRIVALS):
                nursery.start_soon(self.request)
                await trio.sleep(1 / ARRIVALS)
                if number % ARRIVALS == 0:
                    self._engine.check_integrity()
                self.most_open = max(self.most_open, self._engine.statistics().num_streams)


def objects_of_ours() -> Counter[str]:
    """Count the objects of trioserve's classes."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("trioserve.")
    )


async def test_twenty_times_more_than_can_be_served(autojump_clock: Clock) -> None:
    worker = FakeWorker(step_time=REQUEST_SECONDS / 10, max_num_seqs=RUNNING)
    limits: dict[str, Any] = {"max_num_seqs": RUNNING, "max_num_queued_reqs": WAITING}
    async with open_fake_engine(lambda: worker, **limits) as engine:
        flood = Flood(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood.run, SECONDS)
            await trio.sleep(SECONDS / 3)
            early = objects_of_ours()
            await trio.sleep(SECONDS / 2)
            late = objects_of_ours()
        # Those that were refused were told at once.
        assert max(flood.refusals) == 0.0
        assert len(flood.refusals) + len(flood.latencies) == SECONDS * ARRIVALS
        # An admitted request waits for a queue's length at most, and the worker is never idle.
        longest = REQUEST_SECONDS * (1 + WAITING / RUNNING)
        assert max(flood.latencies) <= 1.1 * longest
        assert len(flood.latencies) >= 0.9 * SECONDS * RUNNING / REQUEST_SECONDS
        # Nothing is kept of those that were refused.
        assert flood.most_open <= RUNNING + WAITING
        for name, count in late.items():
            assert count <= early[name] + 2 * (RUNNING + WAITING), name
        assert set(flood.hints) == {1}
        await trio.sleep(10)
        engine.check_integrity()
        assert engine.statistics().num_streams == 0


async def test_long_prompts_fill_the_queue_before_many_do(autojump_clock: Clock) -> None:
    """Keep the wait of admitted requests short by the limit on tokens, too."""
    worker = FakeWorker(step_time=0.1, max_num_batched_tokens=100, num_pages=4096)
    async with open_fake_engine(lambda: worker, max_num_queued_tokens=2000) as engine:
        latencies: list[float] = []
        refused = 0

        async def request() -> None:
            nonlocal refused
            started = trio.current_time()
            try:
                # A salt of its own, so that no prefix is shared.
                await engine.complete([1] * 500, max_tokens=1, cache_salt=str(started))
            except QueueFull:
                refused += 1
            else:
                latencies.append(trio.current_time() - started)

        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(request)
                await trio.sleep(0.1)
        # 100 tokens in a tenth of a second: 2,000 that wait take two seconds.
        assert max(latencies) <= 4.0
        assert refused > 100
        engine.check_integrity()


async def test_over_sockets() -> None:
    worker = FakeWorker(step_time=0.3, max_num_seqs=2)
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_queued_reqs": 4}
    statuses: Counter[int] = Counter()
    async with open_fake_engine(lambda: worker, **limits) as engine:
        config = server_config()
        async with trio.open_nursery() as servers:
            (url,) = await servers.start(serve_app, create_app(engine, config), config)

            async def client() -> None:
                body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
                for _ in range(10):
                    response = await http.post("/v1/completions", json=body)
                    statuses[response.status_code] += 1
                    if statuses[429] > 100:  # more than there can be of others
                        worker.step_time = 0.0
                    if response.status_code == 429:
                        assert 1 <= int(response.headers["Retry-After"]) <= 60
                        assert response.json()["error"]["code"] == "queue_full"

            async with http_client(url) as http, trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(client)
            servers.cancel_scope.cancel()
        assert set(statuses) == {200, 429}
        assert statuses.total() == 200
        assert statuses[200] >= 6
        engine.check_integrity()
        assert engine.statistics().num_streams == 0


async def test_refusals_leave_the_loop_its_turns(autojump_clock: Clock) -> None:
    """At a full queue requests are refused at a bounded pace, before their bodies are read."""
    worker = FakeWorker(step_time=10.0)
    limits: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with open_fake_engine(lambda: worker, **limits) as engine:
        config = server_config(api_key=("key",))
        app = create_app(engine, config)
        key = {"Authorization": "Bearer key"}
        answers: list[Answer] = []

        async def request() -> None:
            for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
                answers.append(await ask(app, path, "no request at all", headers=key))

        async with engine.generate("a") as running:
            await running.receive()
            async with engine.generate("b"):
                began = trio.current_time()
                async with trio.open_nursery() as nursery:
                    for _ in range(30):
                        nursery.start_soon(request)
                assert len(answers) == 90
                # 200 a second, however many ask.
                assert trio.current_time() - began >= 90 * 0.005 - 1e-6
                for answer in answers:
                    assert answer.status == 429
                    assert answer.error["code"] == "queue_full"
                    assert int(answer.headers["retry-after"]) >= 1
                # A request without a key gets no such answer, and one that needs no permit is
                # served.
                assert (await ask(app, "/generate", {})).status == 401
                assert (await ask(app, "/tokenize", {"prompt": "x"}, headers=key)).status == 200
        assert (await ask(app, "/generate", {}, headers=key)).status == 400
        engine.drain()
        assert (await ask(app, "/generate", {}, headers=key)).status == 503
