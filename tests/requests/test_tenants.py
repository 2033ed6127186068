"""Shares of tenants: none can take what another one needs, of the queue, sessions and prefixes."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis
import pytest
import trio.testing
from hypothesis import strategies as st

from tests.support.http_stub import StubEngine, client_of, server_config
from trioserve import InvalidRequest, QueueFull, SessionLimit
from trioserve.http.api.auth import Caller, Keys
from trioserve.requests.tenants import TenantCounts, excess
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock


@hypothesis.given(
    st.integers(1, 2048),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 5))),
)
def test_there_is_always_room_for_one_that_comes_later(
    limit: int, wishes: list[tuple[str, int]]
) -> None:
    taken: dict[str, int] = {}
    for name, new in wishes:
        total = sum(taken.values())
        own = taken.get(name, 0)
        if total + new <= limit and excess(own, new, total - own, limit) <= 0:
            taken[name] = own + new
    assert all(own <= max(limit // 2, 5) for own in taken.values())


def test_a_share_depends_on_what_the_others_take() -> None:
    assert excess(own=0, new=10, others=0, limit=4) == 0  # The first is always within it.
    assert excess(own=5, new=5, others=0, limit=20) == 0
    assert excess(own=5, new=6, others=0, limit=20) == 1
    assert excess(own=5, new=1, others=10, limit=20) == 1


def test_counts_without_a_tenant() -> None:
    counts = TenantCounts()
    counts.add("", 1, 10)
    counts.add("a", 2, 20)
    counts.add("a", -1, -5)
    assert (counts.of("a"), counts.of(""), counts.of("b")) == ((1, 15), (0, 0), (0, 0))
    counts.add("a", -1, -15)
    assert counts == TenantCounts()


def test_only_several_keys_have_shares() -> None:
    key, admin = Caller("key-1", False), Caller("admin-1", True)
    assert Keys(["a", "b"], ["c"]).tenant(key) == "key-1"
    assert Keys(["a", "b"], ["c"]).tenant(admin) == ""
    assert Keys(["a", "b"]).tenant(None) == ""
    assert Keys(["a"], ["c"]).tenant(key) == ""
    assert Keys(["a", "a"]).tenant(key) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": -5},
        {"kv_cache_retention_config": {"decode_retention_priority": 100}},
    ],
)
async def test_only_some_keys_may_set_a_priority(fields: dict[str, Any]) -> None:
    keys = {"api_key": ("usual",), "priority_api_key": ("first",), "admin_api_key": ("admin",)}
    client = client_of(StubEngine(), **keys)

    async def status(key: str, **fields: Any) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "x", **fields}
        response = await client.post("/v1/completions", headers=headers, json=body)
        return response.status_code, await response.get_data(True)

    code, text = await status("usual", **fields)
    assert code == 403
    assert f"{next(iter(fields))} needs a key" in text
    assert (await status("usual", priority=0))[0] == 200
    assert (await status("first", **fields))[0] == 200
    assert (await status("admin", **fields))[0] == 200
    open_client = client_of(StubEngine(), api_key=("usual",))
    headers = {"Authorization": "Bearer usual"}
    response = await open_client.post(
        "/v1/completions", headers=headers, json={"prompt": "x", **fields}
    )
    assert response.status_code == 200


def test_priority_keys_need_others() -> None:
    with pytest.raises(InvalidRequest, match="--api-key"):
        server_config(priority_api_key=("first",))


async def test_a_tenant_cannot_fill_the_queue(autojump_clock: Clock) -> None:
    worker = lambda: FakeWorker(step_time=0.1, num_pages=4096, max_model_len=2048)  # noqa: E731
    async with (
        open_fake_engine(worker, max_num_seqs=1, max_num_queued_reqs=8) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        running = engine.generate("a", max_tokens=2000, ignore_eos=True)
        await (await stack.enter_async_context(running)).receive()
        for _ in range(4):
            await stack.enter_async_context(engine.generate("a", tenant="greedy"))
        with pytest.raises(QueueFull, match=r"4 requests with this key .*--max-num-queued-reqs"):
            await engine.complete("a", tenant="greedy")
        with pytest.raises(QueueFull, match="with this key"):
            engine.check_room("greedy")
        engine.check_integrity()
        for _ in range(2):
            await stack.enter_async_context(engine.generate("a", tenant="modest"))
        await stack.enter_async_context(engine.generate("a", tenant="late"))
        with pytest.raises(QueueFull, match="with this key"):
            await engine.complete("a", tenant="modest")
        await stack.enter_async_context(engine.generate("a"))
        engine.check_integrity()


async def test_a_tenant_cannot_fill_the_queue_with_tokens(autojump_clock: Clock) -> None:
    worker = lambda: FakeWorker(step_time=0.1, num_pages=4096, max_model_len=2048)  # noqa: E731
    async with (
        open_fake_engine(worker, max_num_seqs=1, max_num_queued_tokens=1000) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        running = engine.generate("a", max_tokens=2000, ignore_eos=True)
        await (await stack.enter_async_context(running)).receive()
        await stack.enter_async_context(engine.generate([1] * 500, tenant="greedy"))
        with pytest.raises(QueueFull, match=r"with 500 tokens; .*--max-num-queued-tokens"):
            await engine.complete([1] * 100, tenant="greedy")
        await stack.enter_async_context(engine.generate([1] * 400, tenant="modest"))


async def test_a_tenant_cannot_take_all_sessions() -> None:
    async with open_fake_engine(max_sessions=8) as engine:
        for number in range(4):
            engine.sessions.open(f"{number}", owner="greedy", tenant="greedy")
        with pytest.raises(SessionLimit, match="4 sessions of this key"):
            engine.sessions.open(owner="greedy", tenant="greedy")
        session = engine.sessions.open("0", owner="modest", tenant="modest")
        assert engine.sessions.find("0", "modest") is session
        assert engine.sessions.find("0", "greedy") is not session
        engine.check_integrity()


@pytest.mark.parametrize(("scope", "cached"), [("server", 32), ("key", 0)])
async def test_the_scope_of_cached_prefixes(scope: str, cached: int, autojump_clock: Clock) -> None:
    prompt = [1] * 40
    async with open_fake_engine(prefix_cache_scope=scope) as engine:
        await engine.complete(prompt, tenant="one", max_tokens=1)
        other = await engine.complete(prompt, tenant="two", max_tokens=1)
        assert other.usage.cached_tokens == cached
        own = await engine.complete(prompt, tenant="one", max_tokens=1)
        assert own.usage.cached_tokens == 32
        salted = await engine.complete(prompt, tenant="one", cache_salt="salt", max_tokens=1)
        assert salted.usage.cached_tokens == 0
        # A salt can't name another tenant's prefixes.
        forged = await engine.complete(prompt, tenant="two", cache_salt="one\0", max_tokens=1)
        assert forged.usage.cached_tokens == 0


async def test_a_session_finds_the_prefixes_of_its_tenant(autojump_clock: Clock) -> None:
    async with open_fake_engine(prefix_cache_scope="key") as engine:
        session = engine.sessions.open(owner="one", tenant="one")
        first = await session.complete([1] * 40, tenant="one", max_tokens=1)
        assert first.usage.cached_tokens == 0
        second = await session.complete([2] * 4, tenant="one", max_tokens=1)
        assert second.usage.cached_tokens == 32
        engine.check_integrity()
