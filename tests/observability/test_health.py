"""Is it well: ``/health`` where nothing advances, an idle engine's check, the dump of tasks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from quart_trio.testing import TrioClient

from tests.support.http_stub import StubEngine, client_of, server_config
from trioserve import Engine, EngineError
from trioserve.engine.idle_check import IdleCheck
from trioserve.http import create_app
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

ADMIN = {"Authorization": "Bearer admin"}


def client_over(engine: Engine) -> TrioClient:
    client: Any = create_app(engine, server_config()).test_client()
    return client  # type: ignore[no-any-return]


async def health(client: TrioClient) -> tuple[int, str]:
    """Status and word of ``/health``; ``/health_generate`` must agree while it isn't well."""
    response = await client.get("/health")
    word = (await response.get_json())["status"]
    if word != "ok":
        other = await client.get("/health_generate")
        assert (other.status_code, await other.get_json()) == (503, {"status": word})
    return response.status_code, word


def hanging_worker(*num_steps: int) -> Any:
    """Makes workers of which the first takes for ever after so many steps, and so on."""
    left = list(num_steps)

    def make() -> FakeWorker:
        most = left.pop(0) if left else 1_000_000

        def step_time(plan: wire.Plan) -> float:
            return 0.1 if plan.number <= most else 1e6

        return FakeWorker(step_time=step_time)

    return make


async def test_a_worker_that_hangs_is_stalled_until_it_is_replaced(autojump_clock: object) -> None:
    async with open_fake_engine(hanging_worker(3), watchdog_timeout=10) as engine:
        client = client_over(engine)
        async with engine.generate("x", max_tokens=20) as stream:
            assert await health(client) == (200, "ok")
            await trio.sleep(4)
            assert await health(client) == (200, "ok")
            await trio.sleep(3)
            assert await health(client) == (503, "stalled")
            assert engine.statistics().worker_restarts == 0
            await trio.sleep(5)
            assert engine.statistics().worker_restarts == 1
            assert await health(client) == (200, "ok")
            tokens = [token async for chunk in stream for token in chunk.token_ids]
    assert len(tokens) == 20


async def test_an_idle_engine_is_well_for_as_long_as_it_is_idle(autojump_clock: object) -> None:
    async with open_fake_engine(watchdog_timeout=10) as engine:
        await engine.complete("x", max_tokens=3)
        await trio.sleep(1000)
        assert await health(client_over(engine)) == (200, "ok")


async def test_requests_for_whom_no_plan_is_made_are_a_stall(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulate a bug: the scheduler plans nothing, for ever."""
    async with open_fake_engine() as engine:
        client = client_over(engine)
        core = engine.schedulers[0]._core
        with monkeypatch.context() as patch:
            patch.setattr(core, "next_plan", lambda now: None)
            async with engine.generate("x", max_tokens=3), engine.generate("y", max_tokens=3):
                await trio.sleep(0.1)
                assert await health(client) == (503, "stalled")
                (record,) = [each for each in caplog.records if "stuck" in each.getMessage()]
                assert record.__dict__["fields"] == {"running": 0, "waiting": 1}
        assert len((await engine.complete("x", max_tokens=3)).token_ids) == 3
        assert await health(client) == (200, "ok")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"draining": True}, "draining"),
        ({"draining": True, "stalled": True}, "draining"),
        ({"stalled": True}, "stalled"),
        ({}, "no_worker"),
    ],
)
async def test_what_is_wrong_is_said_in_a_word(changes: dict[str, bool], word: str) -> None:
    engine = attrs.evolve(StubEngine(), healthy=False, **changes)
    client = client_of(engine, api_key=("key",))
    response = await client.get("/health")  # for load balancers: no key is needed
    assert (response.status_code, await response.get_json()) == (503, {"status": word})


# ---- an idle engine


@pytest.fixture
def violations(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The fields of what the idle check logs, as it comes."""
    found: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.__dict__.get("event") == "integrity violated":
                found.append(record.__dict__["fields"])

    handler = Collect()
    logging.getLogger("trioserve.engine").addHandler(handler)
    yield found
    logging.getLogger("trioserve.engine").removeHandler(handler)


async def test_a_page_that_was_lost_is_found_when_the_engine_is_idle(
    autojump_clock: object, violations: list[dict[str, Any]]
) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.1)) as engine:
        await engine.complete("x", max_tokens=3)
        await trio.sleep(5)
        assert engine.metrics.integrity_violations == 0
        core: Any = engine.schedulers[0]._core
        core.memory.pool.allocate(1)  # without an owner
        async with engine.generate("x", max_tokens=30) as stream:
            async for _ in stream:
                assert violations == []
        await trio.sleep(5)
        assert engine.metrics.integrity_violations == 1
        (violation,) = violations
        assert "has an unknown holder (" in violation["finding"]
        # It is counted again, but not told again; and the engine goes on.
        assert len((await engine.complete("x", max_tokens=3)).token_ids) == 3
        await trio.sleep(5)
        assert engine.metrics.integrity_violations == 2
        assert len(violations) == 1


@attrs.define(eq=False)
class LookedAt:
    """An engine as far as the check sees it, which takes ``cost`` seconds to be looked at."""

    clock: trio.testing.MockClock
    cost: float = 0.0
    idle: bool = True
    looks: list[float] = attrs.field(factory=list)
    replies: list[Any] = attrs.field(factory=list)
    steps: int = 0
    metrics: Metrics = attrs.field(factory=lambda: Metrics("m"))

    def check_integrity(self) -> None:
        self.looks.append(trio.current_time())
        self.clock.jump(self.cost)

    def statistics(self) -> int:
        return self.steps

    async def call_all(self, name: str) -> list[Any]:
        assert name == "statistics"
        reply = self.replies.pop(0)
        await trio.sleep(math.inf if reply is None else 0.1)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, dict):
            self.steps += reply.pop("steps", 0)
        return [reply]


@pytest.mark.parametrize(("cost", "distance"), [(0.001, 1.0), (0.5, 50.0)])
async def test_looks_are_rare_and_rarer_where_they_take_long(
    cost: float, distance: float, autojump_clock: trio.testing.MockClock
) -> None:
    engine: Any = LookedAt(autojump_clock, cost)
    check = IdleCheck(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(check.run)
        await trio.sleep(100)
        assert engine.looks == []
        for _ in range(1000):
            check.note()
            await trio.sleep(0.1)
        engine.idle = False
        num_looks = len(engine.looks)
        check.note()
        await trio.sleep(100)
        assert len(engine.looks) == num_looks
        nursery.cancel_scope.cancel()
    gaps = [later - earlier for earlier, later in zip(engine.looks, engine.looks[1:], strict=False)]
    assert engine.looks[0] == 100
    assert min(gaps) >= distance
    assert max(gaps) <= distance + cost + 0.1


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ({"open_slots": 0, "pages_used": 0}, 0),
        ({"open_slots": 2, "pages_used": 7}, 1),
        ({"open_slots": 2, "pages_used": 7, "steps": 1}, 0),
        (EngineError("statistics: unknown"), 0),
        (None, 0),
        ("damaged", 0),
    ],
    ids=[
        "holds nothing",
        "holds something",
        "has work again",
        "refuses",
        "says nothing",
        "damaged",
    ],
)
async def test_an_idle_worker_is_asked_what_it_holds(
    reply: Any,
    found: int,
    autojump_clock: trio.testing.MockClock,
    violations: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: Any = LookedAt(autojump_clock, replies=[reply])
    check = IdleCheck(engine, engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(check.run)
        check.note()
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert [violation["finding"] for violation in violations] == [
        "the worker holds 2 slots and 7 pages of requests that have ended"
    ] * found
    assert engine.replies == []
    silent = ["an idle worker doesn't answer" in record.getMessage() for record in caplog.records]
    assert any(silent) == (reply in (None, "damaged"))


async def test_an_engine_that_stays_idle_is_looked_at_once(autojump_clock: object) -> None:
    calls: list[float] = []

    def statistics(_: object) -> dict[str, int]:
        calls.append(trio.current_time())
        return {"open_slots": 0, "pages_used": 0}

    async with open_fake_engine(lambda: FakeWorker(calls={"statistics": statistics})) as engine:
        check = IdleCheck(engine, engine.schedulers)
        engine.on_none_open = check.note
        engine.schedulers.notify_idle(check.note)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check.run)
            for _ in range(3):
                await engine.complete("x", max_tokens=3)
                await trio.sleep(1000)
            nursery.cancel_scope.cancel()
    # Again after the last plan, if that was on its way when the last request ended.
    assert 3 <= len(calls) <= 6
    assert all(moment % 1000 < 3 for moment in calls)


async def test_several_may_wait_for_an_idle_engine(autojump_clock: object) -> None:
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        async with engine.generate("x", max_tokens=3):
            for _ in range(3):
                nursery.start_soon(engine.wait_idle)
            await trio.sleep(1)
            assert len(nursery.child_tasks) == 3


# ---- the dump


async def test_the_dump_of_tasks_is_for_admins() -> None:
    client = client_of(StubEngine(), api_key=("key",), admin_api_key=("admin",))
    response = await client.get("/debug/tasks", headers=ADMIN)
    text = await response.get_data(as_text=True)
    assert response.content_type == "text/plain; charset=utf-8"
    assert " trio tasks:\n" in text
    assert " in AdminEndpoints.tasks\n" in text
    for headers in ({}, {"Authorization": "Bearer key"}):
        assert (await client.get("/debug/tasks", headers=headers)).status_code == 401
    assert (await client_of(StubEngine()).get("/debug/tasks")).status_code == 403
