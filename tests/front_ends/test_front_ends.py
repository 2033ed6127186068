"""Front ends over one engine: what one process gives, they give, and bounds hold over all.

Both sides are in one program, and the sockets between them are real;
tests/front_ends/test_server.py has the processes.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from tests.support.front_ends import FrontEnd, open_server
from trioserve import (
    Completion,
    EngineConfig,
    EngineError,
    Grammar,
    InvalidRequest,
    QueueFull,
)
from trioserve.front_ends.client import server_api as shared
from trioserve.front_ends.server import peers, requests
from trioserve.front_ends.server.requests import MAX_UNTAKEN
from trioserve.http.api.auth import Caller, Keys
from trioserve.http.api.errors import KeyLimit
from trioserve.http.api.server_api import Permit
from trioserve.protocol.errors import Paused
from trioserve.requests.generation import completion_of
from trioserve.requests.request import State, Times
from trioserve.requests.retention import Retention, RetentionRange
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker

PROMPT = "a prompt that fills a page or two, and then some more"
TENSORS: dict[str, Any] = {"return_hidden_states": "all", "return_generation_logits": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 20},
    "several": {"n": 3, "max_tokens": 9},
    "logprobs": {"max_tokens": 7, "logprobs": 4, "logprob_token_ids": [3, 200]},
    "prompt logprobs": {"max_tokens": 5, "prompt_logprobs": 2},
    "all logprobs": {"n": 2, "max_tokens": 5, "prompt_logprobs": 2, "logprobs": 0},
    "prompt alone": {"max_tokens": 0, "prompt_logprobs": 1, "prompt_logprobs_start": 40},
    "stop string": {"max_tokens": 200, "stop": ["\n", "e"], "include_stop_str_in_output": True},
    "stop id": {"max_tokens": 200, "stop_token_ids": list(range(0, 256, 9))},
    "tensors": {"n": 2, "max_tokens": 9, **TENSORS},
    "tensors of a prompt": {"max_tokens": 0, "return_context_logits": True},
    "tensors and a stop string": {"max_tokens": 200, "stop": ["\n", "e"], **TENSORS},
    "allowed": {"max_tokens": 8, "allowed_token_ids": [65, 66, 67]},
    "grammar": {"max_tokens": 8, "grammar": Grammar("regex", "[a-z]+")},
}


def slow_worker(**options: Any) -> FakeWorker:
    return FakeWorker(step_time=0.01, **options)


def shown(completion: Completion) -> dict[str, Any]:
    """Return all that a caller sees of an answer but the times."""
    logprobs = completion.prompt_logprobs
    return {
        "prompt": completion.prompt_token_ids,
        "prompt_logprobs": None
        if logprobs is None
        else logprobs.entries(list(completion.prompt_token_ids)),
        "outputs": completion.outputs,
        "tensors": [
            {name: (rows.shape, rows.tobytes()) for name, rows in each.items()}
            for each in (completion.tensors, *(output.tensors for output in completion.outputs))
        ],
        "usage": completion.usage,
    }


async def test_the_answers_are_those_of_one_process(tmp_path: Path) -> None:
    async with open_fake_engine() as engine:
        expected = {
            name: shown(await engine.complete(PROMPT, seed=1, **params))
            for name, params in REQUESTS.items()
        }
    async with open_server(tmp_path) as server:
        for front_end in server.front_ends:
            for name, params in REQUESTS.items():
                given = shown(await front_end.engine.complete(PROMPT, seed=1, **params))
                cached = given.pop("usage").cached_tokens
                assert given == {k: v for k, v in expected[name].items() if k != "usage"}, name
                assert cached <= len(PROMPT)
        await server.wait_nothing_held()


async def test_rows_of_tensors_go_before_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_ROW_BYTES", 1)
    params = {"n": 3, "max_tokens": 20, "seed": 1, **TENSORS}
    async with open_fake_engine() as engine:
        expected = await engine.complete(PROMPT, **params)
    async with open_server(tmp_path) as server:
        given = await server.front_ends[0].engine.complete(PROMPT, **params)
        assert shown(given)["tensors"] == shown(expected)["tensors"]
        assert all(len(each.tensors["hidden_states"]) == 20 for each in given.outputs)
        await server.wait_nothing_held()


async def test_usage_counts_drafts_as_in_one_process(tmp_path: Path) -> None:
    def make_worker() -> FakeWorker:
        return FakeWorker(max_row_tokens=4, accepted=lambda context: len(context) % 3)

    params: dict[str, Any] = {"seed": 1, "max_tokens": 30, "n": 2}
    async with open_fake_engine(make_worker) as engine:
        expected = (await engine.complete(PROMPT, **params)).usage
    assert 0 < expected.accepted_draft_tokens < expected.draft_tokens
    async with open_server(tmp_path, make_worker) as server:
        given = (await server.front_ends[0].engine.complete(PROMPT, **params)).usage
    assert given == expected


async def test_many_at_a_time_through_both(tmp_path: Path) -> None:
    prompts = [f"{index} is the beginning of what is said" for index in range(60)]
    async with open_fake_engine() as engine:
        expected = [(await engine.complete(each, seed=1, max_tokens=90)).text for each in prompts]
    given: dict[int, str] = {}

    async def ask(front_end: FrontEnd, index: int) -> None:
        completion = await front_end.engine.complete(prompts[index], seed=1, max_tokens=90)
        given[index] = completion.text

    # So few pages that requests are preempted.
    async with open_server(tmp_path, lambda: FakeWorker(num_pages=60, max_num_seqs=40)) as server:
        async with trio.open_nursery() as nursery:
            for index in range(60):
                nursery.start_soon(ask, server.front_ends[index % 2], index)
        await server.wait_nothing_held()
        assert server.engine_server.statistics().scheduler.num_preemptions > 0
    assert [given[index] for index in range(60)] == expected


async def test_times_and_states_arrive(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        front_end = server.front_ends[1]
        async with front_end.engine.generate(PROMPT, max_tokens=4) as stream:
            chunks = [chunk async for chunk in stream]
            times: Times = stream.times
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4
        order = [times.arrived, times.queued, times.first_scheduled, times.first_token]
        order += [times.last_token, times.finished]
        assert None not in order
        moments = [moment or math.nan for moment in order]
        assert moments == sorted(moments)
        assert moments[-1] - moments[0] < 60
        async with front_end.engine.generate(PROMPT, max_tokens=1000) as stream:
            first = await stream.receive()
            (sequence,) = stream._request.sequences
            assert first.finish_reason is None
            assert sequence.state is State.DECODE
            assert stream.usage.cached_tokens == 48


async def test_leaving_a_block_frees_what_was_held(tmp_path: Path) -> None:
    async with open_server(tmp_path, lambda: slow_worker(max_num_seqs=2)) as server:
        first, second = server.front_ends
        async with contextlib.AsyncExitStack() as stack:
            # Two run, the others wait.
            for front_end in (first, second):
                generation = front_end.engine.generate(PROMPT, max_tokens=1000)
                stream = await stack.enter_async_context(generation)
                await stream.receive()
            for front_end in (first, second):
                await _enter(stack, front_end)
            with trio.fail_after(30):
                while not first.remote.num_waiting == second.remote.num_waiting == 2:
                    await trio.sleep(0.005)
            assert first.remote.num_waiting_tokens == 2 * len(PROMPT)
            assert not server.engine_server.idle
        await server.wait_nothing_held()
        with trio.fail_after(30):
            while first.remote.num_waiting or second.remote.num_waiting:
                await trio.sleep(0.005)
        counted = (await first.server_api._collect()).snapshot
        assert dict(counted.counters["aborts"]) == {("waiting",): 2, ("decode",): 2}


async def test_a_front_end_that_dies_takes_nobody_with_it(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker, max_num_queued_reqs=100) as server:
        first, second = server.front_ends
        async with second.engine.generate(PROMPT, max_tokens=300) as stream:
            await stream.receive()
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(_wait_in, first)
                with trio.fail_after(30):
                    while server.engine_server.statistics().scheduler.num_running < 6:
                        await trio.sleep(0.005)
                assert len(first.peer.requests) == 5
                first.life.cancel()
                await first.gone.wait()
                assert first.peer.num_lost == 5
                assert server.engine_server.peers == [second.peer]
                with trio.fail_after(30):
                    while server.engine_server.statistics().scheduler.num_running > 1:
                        await trio.sleep(0.005)
                nursery.cancel_scope.cancel()
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "length"
        with trio.fail_after(30):
            while not server.engine_server.idle:
                await trio.sleep(0.005)
        server.engine_server.check_integrity()
        assert server.engine_server.statistics().scheduler.pages_held == 0


async def _wait_in(front_end: FrontEnd) -> None:
    async with front_end.engine.generate(PROMPT, max_tokens=1000):
        await trio.sleep_forever()


async def test_a_lost_worker_is_a_pause_for_all(tmp_path: Path) -> None:
    killed = trio.Event()
    workers = iter(range(10))

    config = EngineConfig("fake")

    def open_worker() -> Any:
        return run_fake_worker(slow_worker(), config, killed=None if next(workers) else killed)

    async with open_fake_engine() as engine:
        expected = await engine.complete(PROMPT, seed=1, max_tokens=200)
    async with open_server(tmp_path, open_worker=open_worker) as server:
        completions: list[Completion] = []

        async def ask(front_end: FrontEnd) -> None:
            completions.append(await front_end.engine.complete(PROMPT, seed=1, max_tokens=200))

        async with trio.open_nursery() as nursery:
            for front_end in server.front_ends:
                nursery.start_soon(ask, front_end)
            while server.engine_server.statistics().scheduler.num_tokens_sampled < 10:
                await trio.sleep(0.005)
            killed.set()
        assert [each.token_ids for each in completions] == [expected.token_ids] * 2
        assert server.engine_server.statistics().worker_restarts == 1
        await server.front_ends[0].remote.look()
        assert server.front_ends[0].engine.statistics().worker_restarts == 1
        await server.wait_nothing_held()


async def test_the_queue_is_bounded_over_all(tmp_path: Path) -> None:
    async with open_server(
        tmp_path, lambda: slow_worker(max_num_seqs=1), max_num_queued_reqs=3
    ) as server:
        first, second = server.front_ends
        async with contextlib.AsyncExitStack() as stack:
            await _enter(stack, first)
            with trio.fail_after(30):
                while server.engine_server.statistics().scheduler.num_running < 1:
                    await trio.sleep(0.005)
            for front_end in (first, second, first):
                await _enter(stack, front_end)
            with trio.fail_after(30):
                while second.remote.num_waiting < 3:
                    await trio.sleep(0.005)
            for front_end in (first, second):
                with pytest.raises(QueueFull, match="3 requests are waiting"):
                    front_end.engine.check_room()
            # A front end that doesn't know yet is told by the engine process.
            second.remote._queue_load = (0, 0)
            with pytest.raises(QueueFull, match="3 requests are waiting") as caught:
                await _enter(stack, second)
            assert caught.value.retry_after >= 1
        await server.wait_nothing_held()


async def _enter(stack: contextlib.AsyncExitStack, front_end: FrontEnd) -> None:
    await stack.enter_async_context(front_end.engine.generate(PROMPT, max_tokens=1000))


async def test_what_cannot_be_served_is_refused_as_ever(tmp_path: Path) -> None:
    refusals = {"prepare": lambda _: {"error": "no such thing", "param": "grammar"}}
    async with open_server(tmp_path, lambda: FakeWorker(calls=refusals)) as server:
        engine = server.front_ends[0].engine
        with pytest.raises(InvalidRequest, match="no such thing") as caught:
            await engine.complete(PROMPT, grammar=Grammar("regex", "("))
        assert caught.value.param == "grammar"
        with pytest.raises(InvalidRequest, match="context"):
            await engine.complete([1] * 2047, max_tokens=500)
        with pytest.raises(InvalidRequest, match="can't be sent to the engine"):
            await engine.complete(PROMPT, priority=2**70)
        await server.wait_nothing_held()
        assert (await engine.complete(PROMPT, max_tokens=2)).finish_reason == "length"


async def test_an_abort_while_a_grammar_is_prepared(tmp_path: Path) -> None:
    worker = FakeWorker(call_time=300, calls={"prepare": lambda _: None})
    async with open_server(tmp_path, lambda: worker) as server:
        first, second = server.front_ends
        for front_end in (first, second):
            async with trio.open_nursery() as nursery:
                grammar = Grammar("regex", "a")
                nursery.start_soon(partial(front_end.engine.complete, PROMPT, grammar=grammar))
                with trio.fail_after(20):
                    while not front_end.peer.requests:
                        await trio.sleep(0.005)
                nursery.cancel_scope.cancel()
        await server.wait_nothing_held()
        assert dict((await second.server_api._collect()).snapshot.counters["aborts"]) == {
            ("preparing",): 2
        }


async def test_calls_and_their_errors_come_through(tmp_path: Path) -> None:
    def fails(_: object) -> None:
        raise ValueError("not like this")

    calls = {"echo": lambda arguments: {"said": arguments}, "fails": fails}
    async with open_server(tmp_path, lambda: FakeWorker(calls=calls)) as server:
        for front_end in server.front_ends:
            assert await front_end.engine.call_worker("echo", [1, "x"]) == {"said": [1, "x"]}
            with pytest.raises(EngineError):
                await front_end.engine.call_worker("fails")


async def test_a_call_is_given_up_on_both_sides(tmp_path: Path) -> None:
    worker = FakeWorker(call_time=30, calls={"slow": lambda _: None})
    async with open_server(tmp_path, lambda: worker) as server:
        front_end = server.front_ends[0]
        with trio.move_on_after(0.05) as patience:
            await front_end.engine.call_worker("slow")
        assert patience.cancelled_caught
        with trio.fail_after(30):
            while front_end.peer.rpc._answering:
                await trio.sleep(0.005)


async def test_metrics_are_sums_whoever_is_asked(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        first, second = server.front_ends
        for front_end, count in ((first, 2), (second, 3)):
            for _ in range(count):
                await front_end.engine.complete(PROMPT, max_tokens=4)
        first.engine.metrics.observe_response("POST", "/v1/completions", 200)
        second.engine.metrics.observe_response("POST", "/v1/completions", 200)
        first.engine.metrics.watch_connections(range(3))
        second.engine.metrics.watch_connections(range(4))
        for front_end in (first, second):
            lines = (await front_end.server_api.metrics()).decode().splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            labels = 'engine="0",model_name="fake"'
            expected = {
                f"trioserve:generation_tokens_total{{{labels}}}": 20,
                f"trioserve:prompt_tokens_total{{{labels}}}": 5 * len(PROMPT),
                'trioserve:request_success_total{engine="0",finished_reason="length",'
                'model_name="fake"}': 5,
                f"trioserve:e2e_request_latency_seconds_count{{{labels}}}": 5,
                f"trioserve:time_to_first_token_seconds_count{{{labels}}}": 5,
                f"trioserve:inter_token_latency_seconds_count{{{labels}}}": 15,
                f"trioserve:http_connections{{{labels}}}": 7,
                'trioserve:http_requests_total{method="POST",route="/v1/completions",'
                'status="200"}': 2,
                f"trioserve:num_requests_running{{{labels}}}": 0,
            }
            assert {name: float(values[name]) for name in expected} == expected
        # What a front end has counted doesn't go with it, if it was asked since.
        first.life.cancel()
        await first.gone.wait()
        text = (await second.server_api.metrics()).decode()
        assert 'finished_reason="length",model_name="fake"} 5.0' in text
        assert f"trioserve:http_connections{{{labels}}} 4.0" in text


async def test_health_is_the_engine_processs(tmp_path: Path) -> None:
    async with open_server(tmp_path) as server:
        first, second = server.front_ends
        assert [await each.server_api.health_word() for each in (first, second)] == ["ok", "ok"]
        first.engine.drain()
        assert await first.server_api.health_word() == "draining"
        assert await second.server_api.health_word() == "ok"
        statistics = await second.server_api.statistics()
        assert statistics.num_streams == 0
        async with second.engine.generate(PROMPT, max_tokens=1000):
            assert (await second.server_api.statistics()).num_streams == 1


async def _says_nothing(*_: object) -> None:
    await trio.sleep_forever()


async def test_an_engine_process_that_says_nothing_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_server(tmp_path) as server:
        (first, _) = server.front_ends
        monkeypatch.setattr(shared, "HEALTH_SECONDS", 0.05)
        monkeypatch.setattr(first.remote, "look", _says_nothing)
        assert await first.server_api.health_word() == "stalled"
        monkeypatch.undo()
        assert await first.server_api.health_word() == "ok"


async def test_a_front_end_that_says_nothing_is_counted_as_it_last_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_server(tmp_path) as server:
        first, second = server.front_ends
        await first.engine.complete(PROMPT, max_tokens=3)
        name = 'request_success_total{engine="0",finished_reason="length",model_name="fake"}'
        assert f"trioserve:{name} 1.0" in (await second.server_api.metrics()).decode()
        await first.engine.complete(PROMPT, max_tokens=3)
        monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.05)
        monkeypatch.setitem(cast(Any, first.remote.rpc._handlers), "count", _says_nothing)
        assert f"trioserve:{name} 1.0" in (await second.server_api.metrics()).decode()
        monkeypatch.undo()
        assert f"trioserve:{name} 2.0" in (await second.server_api.metrics()).decode()


async def test_seats_of_a_key_are_those_of_all(tmp_path: Path) -> None:
    options = {"api_key": ("one",), "max_requests_per_key": 2}
    keys = Keys(["one"], max_requests=2)
    caller = Caller("key-1", admin=False)
    async with open_server(tmp_path, server_options=options) as server:
        first, second = server.front_ends
        with await first.server_api.permit(keys, caller):
            with await second.server_api.permit(keys, caller):
                for front_end in (first, second):
                    with pytest.raises(KeyLimit, match="2 requests with this key"):
                        await front_end.server_api.permit(keys, caller)
                with await first.server_api.permit(keys, Caller("admin-1", admin=True)):
                    pass
            with await _permit(first, keys, caller):
                pass
        # A front end that dies gives back its permits.
        for _ in range(2):
            (await _permit(second, keys, caller)).__enter__()
        second.life.cancel()
        await second.gone.wait()
        with await _permit(first, keys, caller), await _permit(first, keys, caller):
            pass


async def _permit(front_end: FrontEnd, keys: Keys, caller: Caller) -> Permit:
    """Wait for a permit: one that was given back a moment ago may not be free yet."""
    with trio.fail_after(30):
        while True:
            with contextlib.suppress(KeyLimit):
                return await front_end.server_api.permit(keys, caller)


async def test_control_reaches_all(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = server.front_ends
        async with (
            first.engine.generate(PROMPT, max_tokens=1000, request_id="a-1") as one,
            second.engine.generate(PROMPT, max_tokens=1000, request_id="a-2") as other,
        ):
            assert await second.server_api.abort(["a-"], prefix=True) == 2
            for stream in (one, other):
                chunks = [chunk async for chunk in stream]
                assert chunks[-1].finish_reason == "abort"
        await first.server_api.pause("wait", refuse=True)
        assert await second.server_api.paused()
        with pytest.raises(Paused):
            await second.engine.complete(PROMPT, max_tokens=2)
        await second.server_api.resume()
        assert not await first.server_api.paused()
        assert (await second.engine.complete(PROMPT, max_tokens=2)).finish_reason == "length"
        assert await first.server_api.flush_cache() > 0
        await first.server_api.release_memory()
        assert await second.server_api.memory_released()
        await second.server_api.resume_memory()
        assert not await first.server_api.memory_released()
        assert (await first.engine.complete(PROMPT, max_tokens=2)).finish_reason == "length"
        with pytest.raises(InvalidRequest, match="mode"):
            await first.server_api.pause("sideways", refuse=False)
        await server.wait_nothing_held()


async def test_several_workers_behind_several_front_ends(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker, data_parallel_size=2) as server:
        first, second = server.front_ends
        async with trio.open_nursery() as nursery:
            for front_end in (first, second):
                for number in range(3):
                    nursery.start_soon(
                        partial(front_end.engine.complete, f"prompt {number}", max_tokens=20)
                    )
        workers = await first.server_api.workers()
        assert [each.index for each in workers] == [0, 1]
        assert all(each.num_steps > 10 for each in workers)
        assert await second.server_api.flush_cache() > 0
        await server.wait_nothing_held()


async def test_steps_of_all_are_told(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = server.front_ends
        assert await first.server_api.iterations() == []
        start = trio.current_time()
        await second.engine.complete(PROMPT, max_tokens=3)
        records = await second.server_api.iterations()
        assert sum(each.num_tokens_sampled for each in records) == 3
        assert all(start <= each.time <= trio.current_time() for each in records)
        assert sum(each.num_tokens_sampled for each in await first.server_api.iterations()) == 0
        assert await first.server_api.cache_events() == []
        retention = Retention([RetentionRange(0, None, 90, 60_000)], output_priority=80)
        await second.engine.complete("a" * 40, max_tokens=3, retention=retention)
        assert {each.kind for each in await second.server_api.cache_events()} == {"stored"}
        pool = server.engine_server.schedulers[0]._core.memory.pool  # type: ignore[union-attr]
        assert 90 in {pool.level(page) for page in pool.kept()}
        await server.wait_nothing_held()


async def test_an_engine_that_fails_ends_every_stream_with_its_error(tmp_path: Path) -> None:
    def dies(_step: int, _plan: Any) -> None:
        raise WorkerDies

    with pytest.raises(EngineError, match="the fake worker ended"):
        async with open_server(
            tmp_path, lambda: FakeWorker(script=dies), max_worker_restarts=0
        ) as server:
            await server.front_ends[0].engine.complete(PROMPT, max_tokens=2)


async def test_one_that_lags_gets_several_steps_as_one(tmp_path: Path) -> None:
    """Check that it delays no other front end, and loses nothing."""
    params: dict[str, Any] = {"max_tokens": 30, "seed": 1, "logprobs": 1, "n": 2}
    async with open_fake_engine() as engine:
        expected = await engine.complete(PROMPT, **params)
    async with open_server(tmp_path, slow_worker) as server:
        first, second = server.front_ends
        async with first.engine.generate(PROMPT, **params) as stream:
            chunks = [await stream.receive()]
            first.peer.hosted.num_untaken += MAX_UNTAKEN
            assert len((await second.engine.complete(PROMPT, max_tokens=15)).token_ids) == 15
            first.peer.hosted.num_untaken -= MAX_UNTAKEN
            first.peer.wake()
            chunks += [chunk async for chunk in stream]
        assert completion_of(stream, chunks).outputs == expected.outputs
        assert max(len(chunk.token_ids) for chunk in chunks) >= 10
        await server.wait_nothing_held()
