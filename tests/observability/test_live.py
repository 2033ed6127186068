"""Pictures of an engine: what they show of each state, and what they cost."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.support.metric_samples import make_request
from trioserve import Engine, EngineError, ImagePart, TextPrompt
from trioserve.observability import live
from trioserve.observability.live.figures import quantile
from trioserve.observability.live.monitor import (
    MAX_WATCHERS,
    STAY_SECONDS,
    SnapshotSubscription,
)
from trioserve.observability.live.prefix import PAGES_FOR_EACH, prefix_of
from trioserve.observability.live.requests import request_row, shown_requests
from trioserve.observability.live.schema import RequestRow, Snapshot, TaskNode
from trioserve.observability.live.tasks import task_tree
from trioserve.observability.live.workers import MAX_STEPS
from trioserve.protocol.errors import ContextTooLong, WatcherLimit
from trioserve.requests.request import TRANSITIONS, State, Times
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine

SECRET = "the cat and the dog and nobody else"


def row_of(snapshot: Snapshot, id: str) -> RequestRow:
    (row,) = [each for each in snapshot.requests if each.id == id]
    return row


def states_of(row: RequestRow) -> list[str]:
    times = [time for _, time in row.timeline]
    assert times == sorted(times)
    return [state for state, _ in row.timeline]


def seconds_of(row: RequestRow) -> list[float]:
    """Return the beginnings of its states, since the first one."""
    return [round(time - row.timeline[0][1], 3) for _, time in row.timeline]


async def seen(watcher: SnapshotSubscription, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot with ``condition``; there is one every 10 ms."""
    with trio.fail_after(600):
        while True:
            snapshot = watcher.take()
            if condition(snapshot):
                return snapshot
            await trio.sleep(0.01)


def one_second(**options: Any) -> FakeWorker:
    """Return a worker with steps of a second each."""
    return FakeWorker(step_time=1.0, **options)


# ---- a request, from its beginning to its end


async def test_a_request_from_its_beginning_to_its_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fake_engine(one_second) as engine, trio.open_nursery() as nursery:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:

            async def ask() -> None:
                await engine.complete(SECRET, max_tokens=4, request_id="a", priority=3)

            nursery.start_soon(ask)
            await trio.sleep(0.5)
            row = row_of(watcher.take(), "a")
            assert (row.state, row.finish_reason) == ("decode", None)  # As far as it is planned.
            assert states_of(row) == ["tokenizing", "waiting", "prefill"]
            assert row.prompt_tokens == len(SECRET)
            assert (row.priority, row.adapter, row.outputs) == (3, None, 1)
            await trio.sleep(2.0)
            row = row_of(watcher.take(), "a")
            assert (row.state, row.output_tokens, row.max_tokens) == ("decode", 2, 4)
            assert row.computed_tokens == len(SECRET) + 1
            assert row.pages == -(-row.computed_tokens // 16)
            await trio.sleep(4.0)
            row = row_of(watcher.take(), "a")
            assert (row.state, row.finish_reason) == ("finished", "length")
            assert states_of(row) == ["tokenizing", "waiting", "prefill", "decode", "finished"]
            assert seconds_of(row) == [0, 0, 0, 1, 4]
            assert (row.output_tokens, row.computed_tokens, row.pages) == (4, 0, 0)
            await trio.sleep(STAY_SECONDS)
            assert watcher.take().requests == []


async def test_who_is_preempted_and_comes_back(autojump_clock: trio.testing.MockClock) -> None:
    def small() -> FakeWorker:
        return FakeWorker(step_time=0.1, num_pages=8, page_size=4)

    async with open_fake_engine(small) as engine, trio.open_nursery() as nursery:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            for id in ("a", "b"):

                async def ask(id: str = id) -> None:
                    await engine.complete(id * 8, max_tokens=20, request_id=id)

                nursery.start_soon(ask)
            snapshot = await seen(
                watcher, lambda snapshot: snapshot.counts.waiting + snapshot.counts.preempted > 0
            )
            await seen(watcher, lambda snapshot: snapshot.counts.finished_total == 2)
            snapshot = watcher.take()
            rows = [row_of(snapshot, id) for id in ("a", "b")]
    paths = sorted((states_of(row) for row in rows), key=len)
    straight = ["tokenizing", "waiting", "prefill", "decode", "finished"]
    assert paths[0] == straight
    detour = ["preempted", "waiting", "prefill", "decode"]
    assert paths[1] == [*straight[:-1], *detour * (len(paths[1]) // 4 - 1), "finished"]
    assert len(paths[1]) > len(straight)


async def test_a_worker_that_dies_is_shown_and_so_is_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lives = itertools.count(1)

    def mortal() -> FakeWorker:
        life = next(lives)

        def script(step: int, _: object) -> None:
            if life == 1 and step == 3:
                raise WorkerDies

        return one_second(script=script)

    async with open_fake_engine(mortal) as engine, trio.open_nursery() as nursery:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            before = watcher.take()
            assert (before.health, before.worker.state) == ("ok", "running")
            assert (before.worker.restarts, before.worker.last_death) == (0, None)

            async def ask() -> None:
                await engine.complete("abc", max_tokens=6, request_id="a")

            nursery.start_soon(ask)
            gone = await seen(watcher, lambda snapshot: snapshot.health == "no_worker")
            assert (gone.worker.state, gone.worker.pid) == ("restarting", None)
            assert gone.worker.last_death == "it failed; the log tells why"
            assert gone.worker.since > before.worker.since
            assert row_of(gone, "a").state in ("waiting", "preempted")
            assert gone.pages.held == 0
            after = await seen(watcher, lambda snapshot: snapshot.counts.finished_total == 1)
    assert (after.health, after.worker.state, after.worker.restarts) == ("ok", "running", 1)
    row = row_of(after, "a")
    assert row.output_tokens == 6
    straight = ["tokenizing", "waiting", "prefill", "decode"]
    assert states_of(row) == [*straight, "preempted", *straight[1:], "finished"]


async def test_pauses_and_a_worker_that_is_sent_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fake_engine(one_second) as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            await engine.pause("wait")
            assert watcher.take().paused
            engine.resume()
            assert not watcher.take().paused
            await engine.release_memory()
            snapshot = watcher.take()
            assert (snapshot.worker.state, snapshot.worker.pid) == ("released", None)
            assert snapshot.health == "no_worker"
            await engine.resume_memory()
            snapshot = watcher.take()
            assert (snapshot.worker.state, snapshot.worker.restarts) == ("running", 0)
            assert snapshot.worker.last_death is None
            engine.weight_version = "step 7"
            assert watcher.take().weight_version == "step 7"


async def test_who_leaves_and_who_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(one_second, max_num_seqs=1) as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            async with trio.open_nursery() as nursery:
                for id in ("runs", "waits"):

                    async def ask(id: str = id) -> None:
                        await engine.complete("abc", max_tokens=9, request_id=id)

                    nursery.start_soon(ask)
                    await trio.sleep(0.1)
                snapshot = watcher.take()
                assert [row.id for row in snapshot.requests] == ["waits", "runs"]
                assert row_of(snapshot, "waits").state == "waiting"
                assert (snapshot.counts.waiting, snapshot.counts.running) == (1, 1)
                await trio.sleep(3)
                nursery.cancel_scope.cancel()
            with pytest.raises(ContextTooLong):
                await engine.complete([1] * 5000, request_id="too long")
            snapshot = watcher.take()
    for id, last in (("runs", "decode"), ("waits", "waiting")):
        row = row_of(snapshot, id)
        assert (row.state, row.finish_reason) == ("finished", "abort")
        assert states_of(row)[-2:] == [last, "finished"]
    assert snapshot.counts.aborted_total == snapshot.counts.finished_total == 2
    assert snapshot.counts.streams == 0


async def test_several_outputs_are_one_request(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(one_second) as engine, trio.open_nursery() as nursery:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:

            async def ask() -> None:
                await engine.complete(SECRET, max_tokens=4, n=3, request_id="a")

            nursery.start_soon(ask)
            await trio.sleep(3.5)
            row = row_of(watcher.take(), "a")
            assert (row.outputs, row.state) == (3, "decode")
            assert row.output_tokens > 3
            await trio.sleep(10)
            assert row_of(watcher.take(), "a").output_tokens == 12


async def test_an_adapter_has_its_name(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(one_second, enable_lora=True) as engine:
        await engine.load_adapter("poet", "/poet")
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            await engine.complete("abc", max_tokens=2, adapter="poet", request_id="a")
            assert row_of(watcher.take(), "a").adapter == "poet"


async def test_no_word_of_anybody_is_in_a_picture(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(one_second) as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            async with engine.generate(SECRET, max_tokens=9, cache_salt="salted") as stream:
                open_ = watcher.take()
                text = "".join([chunk.text async for chunk in stream])
            for snapshot in (open_, watcher.take()):
                told = msgspec.json.encode(snapshot)
                assert SECRET[:7].encode() not in told
                assert b"salted" not in told
                assert text.encode() not in told
                assert msgspec.json.decode(told, type=Snapshot) == snapshot


WORDS = {
    state.value: {each.value for each in following} for state, following in TRANSITIONS.items()
}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_pictures_agree_with_themselves(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Requests come and leave, pages run out, and workers die, while pictures are taken."""
    rng = random.Random(seed)

    def mortal() -> FakeWorker:
        last = rng.randrange(20, 80)

        def script(step: int, _: object) -> None:
            if step == last:
                raise WorkerDies

        return FakeWorker(step_time=0.1, num_pages=24, page_size=4, max_num_seqs=8, script=script)

    async def come_and_go(engine: Engine, number: int) -> None:
        await trio.sleep(rng.uniform(0, 8))
        with trio.move_on_after(rng.choice([0.0, 0.3, 2.0, 1000.0])):
            prompt = [number % 3] * rng.randrange(1, 24)
            await engine.complete(prompt, max_tokens=rng.randrange(1, 40), request_id=str(number))

    paths = set()
    async with open_fake_engine(mortal, max_worker_restarts=1000) as engine:
        with live.monitor_of(engine).watched(requests=100, nodes=50) as watcher:
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(come_and_go, engine, number)
                while len(nursery.child_tasks) > 0:
                    paths |= set(map(tuple, map(states_of, agreeing(watcher.take()).requests)))
                    await trio.sleep(0.05)
    for path in paths:
        for state, following in itertools.pairwise(path):
            assert following in WORDS[state], path
    assert any("preempted" in path for path in paths)
    assert {path[0] for path in paths} == {"tokenizing"}


def agreeing(snapshot: Snapshot) -> Snapshot:
    """``snapshot``, of requests of one output each, all of which it shows."""
    counts, pages = snapshot.counts, snapshot.pages
    assert pages.free + pages.cached + pages.held == pages.total
    states = Counter(row.state for row in snapshot.requests)
    assert states["prefill"] + states["decode"] == counts.running
    assert (states["waiting"], states["preempted"]) == (counts.waiting, counts.preempted)
    assert snapshot.num_requests_left_out == 0
    in_tree = sum(node.pages for node in snapshot.prefix.nodes) + snapshot.prefix.num_left_out
    assert pages.cached <= in_tree <= pages.cached + pages.held
    for row in snapshot.requests:
        assert (row.finish_reason is not None) == (row.state == "finished")
        assert row.computed_tokens <= row.prompt_tokens + row.output_tokens
        assert row.pages * 4 >= row.computed_tokens
    return snapshot


# ---- what it costs


async def test_nothing_is_recorded_while_nobody_watches() -> None:
    async with open_fake_engine() as engine:
        monitor = live.monitor_of(engine)
        iterations = monitor.workers.schedulers[0].feeds.iterations.feed

        def wanted() -> list[bool]:
            return [monitor.departures.is_wanted, iterations.is_wanted]

        assert wanted() == [False, False]
        # The start has tasks of its own, which end by themselves.
        await trio.testing.wait_all_tasks_blocked()
        num_tasks = len(list(tasks_of(task_tree())))
        with trio.CancelScope() as scope:
            async with live.watch(engine, interval=0.01) as snapshots:
                async for snapshot in snapshots:
                    assert wanted() == [True, True]
                    # It has no task of its own.
                    assert len(list(tasks_of(snapshot.tasks))) == num_tasks
                    scope.cancel()
        assert scope.cancelled_caught
        assert wanted() == [False, False]
        with pytest.raises(ValueError, match="whose"):
            async with live.watch(engine):
                raise ValueError("whose block this is")
        assert wanted() == [False, False]


def tasks_of(node: TaskNode) -> Iterator[TaskNode]:
    yield node
    for child in node.children:
        yield from tasks_of(child)


async def test_the_end_of_the_engine_ends_the_pictures() -> None:
    async with open_fake_engine() as engine:
        watch = live.watch(engine, interval=0.01)
        snapshots = await watch.__aenter__()
        assert (await anext(snapshots)).health == "ok"
        engine.drain()
        assert (await anext(snapshots)).health == "draining"
    with pytest.raises(EngineError, match="closed"):
        await anext(snapshots)
    await watch.__aexit__(None, None, None)


async def test_pictures_come_when_they_are_due_and_no_sooner(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fake_engine() as engine, live.watch(engine, interval=2.0) as snapshots:
        began = trio.current_time()
        times = []
        for pause in (0.0, 0.5, 0.5, 5.0, 0.0, 0.0):
            await anext(snapshots)
            times.append(trio.current_time() - began)
            await trio.sleep(pause)
        assert times == [0, 2, 4, 6, 11, 13]


async def test_only_so_many_may_watch() -> None:
    async with open_fake_engine() as engine:
        monitor = live.monitor_of(engine)
        watches = [monitor.watched(requests=1, nodes=1) for _ in range(MAX_WATCHERS)]
        for each in watches:
            each.__enter__()
        with pytest.raises(WatcherLimit):
            async with live.watch(engine):
                pass
        watches[0].__exit__(None, None, None)
        async with live.watch(engine) as snapshots:
            await anext(snapshots)
        for each in watches[1:]:
            each.__exit__(None, None, None)


async def test_a_large_crowd_is_not_walked_through(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fake_engine(one_second, max_num_seqs=4) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(400):

                async def ask(number: int = number) -> None:
                    await engine.complete([number % 250], max_tokens=9, request_id=f"{number}")

                nursery.start_soon(ask)
            await trio.sleep(0.5)
            with live.monitor_of(engine).watched(requests=20, nodes=10) as watcher:
                snapshot = watcher.take()
                assert len(snapshot.requests) == 20
                assert snapshot.num_requests_left_out == 380
                running = [row for row in snapshot.requests if row.state in ("prefill", "decode")]
                assert len(running) == snapshot.counts.running == 4
                looked_at = len(list(tasks_of(snapshot.tasks)))
                assert looked_at < 50
                await trio.sleep(15)  # Some have ended.
                snapshot = watcher.take()
                assert len(snapshot.requests) == 20
                ended = [row for row in snapshot.requests if row.state == "finished"]
                assert 4 <= len(ended) <= 8
                assert len(snapshot.steps) <= MAX_STEPS
            nursery.cancel_scope.cancel()


def test_of_many_requests_few_are_looked_at() -> None:
    num_seen = 0

    def counted(requests: Sequence[Any]) -> Iterator[Any]:
        nonlocal num_seen
        for each in requests:
            num_seen += 1
            yield each

    class Asked:
        def __init__(self, arrived: float) -> None:
            self.times = self
            self.arrived = arrived

    requests = [Asked(arrived) for arrived in range(10_000)]
    running = requests[:100]
    shown = shown_requests(counted(running), counted(requests[::-1]), 200)
    expected: list[Any] = [*requests[:-101:-1], *running[::-1]]
    assert shown == expected
    assert num_seen <= 400
    assert len(shown_requests(counted(requests), counted(requests[::-1]), 50)) == 50
    assert shown_requests(counted(requests), counted(requests), 0) == []


class CountingPool(PagePool):
    """Page pool that counts requests for the holders of a page."""

    num_asked = 0

    def holders(self, page: int) -> int:
        CountingPool.num_asked += 1
        return super().holders(page)


def tree(num_pages: int, paths: Sequence[Sequence[int]]) -> PrefixCache:
    """Return a tree with a path for each list of tokens, a page for each token, without holders."""
    cache = PrefixCache(CountingPool(num_pages), page_size=1)
    for path in paths:
        known = cache.path(("",), path, len(path))
        pages = [node.page for node in known]
        cache.pool.share(pages)
        pages += cache.pool.allocate(len(path) - len(known))
        cache.pool.release(
            cache.leave(("",), known[-1] if known else None, path, pages, len(path)), 0
        )
    CountingPool.num_asked = 0
    return cache


def test_pages_without_a_fork_are_one_node() -> None:
    cache = tree(20, [(1, 2, 3), (1, 2, 4, 5), (6, 7)])
    cache.pool.share([cache.path(("",), (6,), 1)[0].page])
    prefix = prefix_of(cache, 10)
    assert prefix.num_left_out == 0
    shapes = {node.id: (node.parent, node.pages, node.users) for node in prefix.nodes}
    # Pages are given in the order of their numbers.
    assert shapes == {
        0: (None, 2, 0),
        2: (0, 1, 0),
        3: (0, 2, 0),
        5: (None, 1, 1),
        6: (5, 1, 0),
    }
    parents = [node.id for node in prefix.nodes]
    assert all(node.parent is None or node.parent in parents for node in prefix.nodes)
    assert prefix_of(cache, 0).nodes == []
    assert prefix_of(cache, 0).num_left_out == 7


@pytest.mark.parametrize(
    "paths",
    [
        [tuple(range(20_000))],
        [(number,) for number in range(20_000)],
        [(number % 100, number) for number in range(10_000)],
    ],
    ids=["deep", "wide", "both"],
)
def test_a_large_tree_is_not_walked_through(paths: list[tuple[int, ...]]) -> None:
    cache = tree(20_100, paths)
    prefix = prefix_of(cache, 30)
    assert 0 < len(prefix.nodes) <= 30
    assert sum(node.pages for node in prefix.nodes) + prefix.num_left_out == cache.num_nodes
    assert CountingPool.num_asked <= 2 * 30 * PAGES_FOR_EACH
    assert len({node.id for node in prefix.nodes}) == len(prefix.nodes)


def num_in(node: TaskNode) -> int:
    """Tasks that were looked at, those included that look alike."""
    return node.count * (1 + sum(map(num_in, node.children)))


async def sleeper() -> None:
    await trio.sleep_forever()


async def parent_of(number: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(number):
            nursery.start_soon(sleeper)


async def test_tasks_that_look_alike_are_one() -> None:
    async with trio.open_nursery() as nursery:
        for number in (2, 2, 3):
            nursery.start_soon(parent_of, number)
        await trio.testing.wait_all_tasks_blocked()
        root = trio.lowlevel.current_task()
        node = task_tree(root)
        assert node.state == "running"
        shapes = [(child.count, [each.count for each in child.children]) for child in node.children]
        assert shapes == [(2, [2]), (1, [3])]
        (leaf,) = node.children[0].children
        assert leaf.name.endswith(".sleeper")
        assert (leaf.state, leaf.children, leaf.num_left_out) == ("waiting", [], 0)
        nursery.cancel_scope.cancel()
        assert {child.state for child in task_tree(root).children} <= {"cancelled", "ready"}


async def test_of_many_tasks_few_are_looked_at() -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(5_000):
            nursery.start_soon(sleeper)
        for _ in range(20):
            nursery.start_soon(parent_of, 30)
        await trio.testing.wait_all_tasks_blocked()
        for most, most_in_nursery in ((200, 40), (60, 50), (1000, 10)):
            node = task_tree(
                trio.lowlevel.current_task(), most=most, most_in_nursery=most_in_nursery
            )
            assert 1 + most_in_nursery <= num_in(node) <= most
            assert sum(child.count for child in node.children) == most_in_nursery
            assert node.num_left_out == 5_020 - most_in_nursery
            for parent in node.children:  # the choice among them is unspecified
                num_children = sum(child.count for child in parent.children)
                assert num_children <= most_in_nursery
                assert num_children + parent.num_left_out in (0, 30)
        nursery.cancel_scope.cancel()


async def test_the_tree_names_the_engines_tasks() -> None:
    async with open_fake_engine() as engine, live.watch(engine) as snapshots:
        names = {node.name for node in tasks_of((await anext(snapshots)).tasks)}
    wanted = ("TokenizerTask.run", "Schedulers.run", "Detokenizer.run", "WorkerGroup.run_worker")
    assert all(any(name.endswith(each) for name in names) for each in wanted)


# ---- figures


async def test_rates_are_those_between_two_pictures(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(one_second, max_plans_in_flight=1) as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            rates = watcher.take().rates
            assert (rates.steps_per_s, rates.step_ms, rates.gpu_idle_share) == (0, None, None)
            await engine.complete("a" * 40, max_tokens=4)
            await engine.complete("a" * 40, max_tokens=4)
            seconds = trio.current_time()
            snapshot = watcher.take()
            await trio.sleep(2)
            watcher.take()  # The last slot has been closed.
            await trio.sleep(2)
            later = watcher.take()
    rates = snapshot.rates
    # Between the two is a step that computes nothing: it only closes a slot.
    num_steps = len(snapshot.steps)
    assert 8 <= num_steps == snapshot.steps[-1].number <= 10
    assert rates.generated_tokens_per_s == 8 / seconds
    assert rates.prompt_tokens_per_s == (40 + 8) / seconds
    assert rates.requests_per_s == 2 / seconds
    assert rates.steps_per_s == num_steps / seconds
    assert (rates.step_ms, rates.batch_rows) == (1000, 1)
    assert rates.cache_hit_share == 32 / 80
    assert rates.gpu_idle_share == 0
    steps = [step for step in snapshot.steps if step.tokens]
    assert [step.rows_prefill for step in steps] == [1, 0, 0, 0] * 2
    assert [step.tokens for step in steps] == [40, 1, 1, 1, 8, 1, 1, 1]
    assert snapshot.latency.ttft is not None
    assert 0.75 <= snapshot.latency.ttft.p50 <= 1 < snapshot.latency.ttft.p99 <= 2.5
    assert snapshot.latency.e2e is not None
    assert later.rates.steps_per_s == later.rates.requests_per_s == 0
    assert later.rates.step_ms is later.rates.batch_rows is later.rates.cache_hit_share is None
    assert later.steps == []
    assert later.latency == snapshot.latency


async def test_the_share_of_accepted_drafts(autojump_clock: trio.testing.MockClock) -> None:
    def drafting() -> FakeWorker:
        return FakeWorker(step_time=1, max_row_tokens=3, accepted=lambda context: 1)

    async with open_fake_engine(drafting) as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            assert watcher.take().rates.draft_acceptance_share is None
            await engine.complete("abc", max_tokens=20)
            share = watcher.take().rates.draft_acceptance_share
            counted = engine.statistics().scheduler
    assert share == counted.num_accepted_drafts / counted.num_draft_tokens
    assert 0.4 < share <= 0.5


async def test_latencies_are_of_the_last_minute(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(one_second) as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            await engine.complete("abc", max_tokens=2)
            for _ in range(58):
                assert watcher.take().latency.ttft is not None
                await trio.sleep(1)
            for _ in range(5):
                watcher.take()
                await trio.sleep(1)
            assert watcher.take().latency.ttft is None
            assert watcher.take().counts.finished_total == 1


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 0, 0, 0], 0.5, 0.5),
        ([10, 10, 0, 0], 0.5, 1.0),
        ([10, 10, 0, 0], 0.75, 1.5),
        ([0, 0, 4, 0], 0.5, 3.0),
        ([0, 0, 0, 5], 0.5, 4.0),
        ([1, 0, 0, 1], 0.99, 4.0),
    ],
)
def test_a_quantile_lies_within_its_bucket(
    counts: list[int], share: float, expected: float
) -> None:
    assert quantile((1.0, 2.0, 4.0), counts, share) == pytest.approx(expected)


# ---- other engines


async def test_an_engine_that_embeds_is_shown_too(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_encoder() as engine:
        with live.monitor_of(engine).watched(requests=10, nodes=10) as watcher:
            await engine.embed(["one", "two"])
            snapshot = watcher.take()
    assert snapshot.counts.finished_total == 2
    assert snapshot.requests == []
    assert snapshot.prefix.nodes == []


def test_a_request_with_images_is_encoding() -> None:
    request = make_request(Times(arrived=1.0), 0, 0)
    request.prompt = TextPrompt("<image>", media=(ImagePart(b"x"),))
    for queued, state in ((None, State.TOKENIZING), (2.0, State.WAITING)):
        request.times.queued = queued
        request.sequences[0].state = state
        row = request_row(request, adapter_name=lambda _: None, worker=None, offset=0.0, now=3.0)
        later = [] if queued is None else [("waiting", queued)]
        assert row.timeline == [("encoding", 1.0), *later]
        assert row.state == row.timeline[-1][0]
