"""Pictures of a server of several processes: the same through whichever front end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from tests.support.front_ends import Server, open_server
from trioserve import Engine, EngineError
from trioserve.engine.cache_copy import CacheCopy
from trioserve.engine.cache_feed import CacheFeed
from trioserve.front_ends.calls import EngineCalls
from trioserve.front_ends.messages import RpcCall, RpcCancel
from trioserve.front_ends.rpc import RpcPeer
from trioserve.front_ends.server.subscriptions import FrontEndSubscriptions
from trioserve.http.api.server_api import TakeSnapshot
from trioserve.observability import live
from trioserve.observability.live.schema import Snapshot, TaskNode
from trioserve.protocol.errors import WatcherLimit
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


def slow() -> FakeWorker:
    return FakeWorker(step_time=0.01)


async def seen(take: TakeSnapshot, condition: Callable[[Snapshot], bool]) -> Snapshot:
    with trio.fail_after(60):
        while not condition(snapshot := await take()):
            await trio.sleep(0.01)
    return snapshot


async def until_unwatched(server: Server) -> None:
    monitor = server.engine_server.monitor
    iterations = monitor.workers.schedulers[0].feeds.iterations.feed
    with trio.fail_after(60):
        while monitor.departures.is_wanted or iterations.is_wanted:
            await trio.sleep(0.01)


async def test_every_front_end_shows_the_whole_server(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow) as server, trio.open_nursery() as nursery:
        first, second = server.front_ends
        assert not isinstance(first.engine, Engine)

        async def ask() -> None:
            await first.engine.complete("abc", max_tokens=50, request_id="of the first")

        async with second.server_api.watch(requests=10, nodes=10) as take:
            assert (await take()).requests == []
            nursery.start_soon(ask)
            snapshot = await seen(take, lambda snapshot: bool(snapshot.requests))
            assert snapshot.requests[0].id == "of the first"
            assert snapshot.health == "ok"
            assert snapshot.worker.state == "running"
            snapshot = await seen(take, lambda snapshot: snapshot.counts.finished_total == 1)
            (row,) = snapshot.requests
            assert (row.state, row.finish_reason) == ("finished", "length")
            assert (row.worker, [each.index for each in snapshot.workers]) == (0, [0])
            assert [state for state, _ in row.timeline] == [
                *("tokenizing", "waiting", "prefill", "decode", "finished")
            ]
            # What the front ends count is in it.
            assert snapshot.latency.e2e is not None
            assert snapshot.latency.ttft is not None
            assert_processes(snapshot.tasks)
        await until_unwatched(server)


def assert_processes(tasks: TaskNode) -> None:
    names = [node.name for node in tasks.children]
    assert (tasks.name, names) == ("server", ["engine", "front end 0", "front end 1"])
    assert all(len(node.children) == 1 for node in tasks.children)


async def test_who_leaves_through_a_front_end_is_shown_as_aborted(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow) as server:
        first, second = server.front_ends
        async with second.server_api.watch(requests=10, nodes=10) as take:
            async with first.engine.generate("abc", max_tokens=500):
                await seen(take, lambda snapshot: snapshot.counts.running == 1)
            snapshot = await seen(
                take, lambda snapshot: [row.state for row in snapshot.requests] == ["finished"]
            )
            assert snapshot.requests[0].finish_reason == "abort"


async def test_a_front_end_that_goes_watches_no_more(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        first, second = server.front_ends
        async with second.server_api.watch(requests=1, nodes=1) as take:
            await take()
            with pytest.raises(EngineError):
                async with first.server_api.watch(requests=1, nodes=1) as dying:
                    await dying()
                    assert server.engine_server.monitor.departures.num_readers == 2
                    first.life.cancel()
                    await first.gone.wait()
                    assert server.engine_server.monitor.departures.num_readers == 1
                    raise EngineError("the block's own")
            snapshot = await take()
            assert [node.name for node in snapshot.tasks.children] == ["engine", "front end 1"]
        await until_unwatched(server)


async def test_who_changes_their_mind_watches_nothing() -> None:
    """Cancel a call before its handler begins."""
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        monitor = live.monitor_of(engine)

        async def look_around() -> list[TaskNode]:
            return []

        watches = FrontEndSubscriptions(monitor, look_around, CacheFeed(tuple))
        rpc = RpcPeer(lambda _: None, EngineCalls.handlers(watches), EngineError("gone"))
        rpc.on_ask(RpcCall(1, "watch", [7, 1, 1]), nursery)
        rpc.on_withdraw(RpcCancel(1))
        watches.leave(7)
        await trio.testing.wait_all_tasks_blocked()
        assert not monitor.departures.is_wanted


async def test_the_limit_is_that_of_all_front_ends(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        watches = [
            front_end.server_api.watch(requests=1, nodes=1)
            for front_end in server.front_ends
            for _ in range(live.MAX_WATCHERS // 2)
        ]
        for each in watches:
            await each.__aenter__()
        with pytest.raises(WatcherLimit):
            async with server.front_ends[0].server_api.watch(requests=1, nodes=1):
                pass
        for each in watches:
            await each.__aexit__(None, None, None)
        await until_unwatched(server)


async def test_a_front_end_that_says_nothing_holds_no_picture_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: object) -> None:
        await trio.sleep_forever()

    async with open_server(tmp_path) as server:
        first, second = server.front_ends
        async with second.server_api.watch(requests=1, nodes=1) as take:
            await take()
            monkeypatch.setitem(cast(Any, first.remote.rpc)._handlers, "look", never)
            with trio.fail_after(60):
                snapshot = await take()
            # What it said before.
            assert_processes(snapshot.tasks)


async def test_a_server_that_drains_says_so(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        front_end = server.front_ends[0]
        async with front_end.server_api.watch(requests=1, nodes=1) as take:
            front_end.engine.drain()
            assert (await take()).health == "draining"


async def test_nobody_of_that_number_watches(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        front_end = server.front_ends[0]
        with pytest.raises(EngineError, match="no subscription"):
            await front_end.remote.calls.take_snapshot(12)
        async with front_end.server_api.watch(requests=1, nodes=1):
            pass
        watches: FrontEndSubscriptions = front_end.peer._watches
        watches.leave(99)
        watches.leave_all()


async def test_the_caches_are_read_through_a_front_end(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow) as server:
        first, second = server.front_ends
        await second.engine.complete("a" * 40, max_tokens=3)
        copied = CacheCopy()
        async with first.server_api.read_cache() as take:
            copied.apply(await take())
            assert len(copied.pages[0]) == 2
            await second.engine.complete("b" * 40, max_tokens=3)
            while len(copied.pages[0]) < 4:
                copied.apply(await take())
        feed = server.engine_server.schedulers.cache_feed
        with trio.fail_after(10):
            while feed.events.is_wanted:
                await trio.sleep(0.01)
        await server.wait_nothing_held()
