"""The executor: handles of requests that end with the block that they were submitted in."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trioserve.engine.engine import Engine
from trioserve.protocol.errors import InvalidRequest, QueueFull, RequestAborted
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


async def assert_idle(engine: Engine) -> None:
    await trio.sleep(0.1)
    engine.check_integrity()
    statistics = engine.statistics()
    assert statistics.num_streams == statistics.scheduler.pages_held == 0
    assert statistics.scheduler.num_running == statistics.scheduler.num_waiting == 0


def slow_worker() -> FakeWorker:
    return FakeWorker(step_time=0.01)


async def test_results_are_those_of_complete(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        prompts = ["one", "two", "three"]
        expected = [await engine.complete(each, max_tokens=5, seed=1) for each in prompts]
        async with engine.submissions() as executor:
            handles = [executor.submit(each, max_tokens=5, seed=1) for each in prompts]
            assert not any(handle.done() for handle in handles)
            results = [await handle.result() for handle in handles]
            assert [each.token_ids for each in results] == [each.token_ids for each in expected]
            assert [each.text for each in results] == [each.text for each in expected]
            assert all(handle.done() for handle in handles)
            assert await handles[0].result() == results[0]
        await assert_idle(engine)


async def test_chunks_can_be_read_by_several_and_again(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine, engine.submissions() as executor:
        handle = executor.submit("abc", max_tokens=4)
        read: list[list[int]] = [[], []]

        async def follow(into: list[int]) -> None:
            async for chunk in handle:
                into += chunk.token_ids

        async with trio.open_nursery() as nursery:
            for into in read:
                nursery.start_soon(follow, into)
        whole = list((await handle.result()).token_ids)
        assert len(whole) == 4
        assert read == [whole, whole]
        again: list[int] = []
        await follow(again)
        assert again == whole


async def test_a_timeout_leaves_the_request_alone(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine, engine.submissions() as executor:
        handle = executor.submit("abc", max_tokens=50)
        with pytest.raises(TimeoutError, match=r"0\.1 seconds"):
            await handle.result(timeout=0.1)
        assert not handle.done()
        assert len((await handle.result(timeout=10)).token_ids) == 50


async def test_abort(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        async with engine.submissions() as executor:
            running, never = (executor.submit("abc", max_tokens=900) for _ in range(2))
            never.abort()
            await trio.sleep(0.1)
            assert engine.statistics().num_streams == 1
            running.abort()
            running.abort()
            for handle in (running, never):
                assert handle.done()
                with pytest.raises(RequestAborted):
                    await handle.result()
            with pytest.raises(RequestAborted):
                async for _ in running:
                    pass
            await trio.testing.wait_all_tasks_blocked()
            assert engine.statistics().num_streams == 0
        await assert_idle(engine)


async def test_leaving_the_block_aborts_what_is_open(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        async with engine.submissions() as executor:
            handles = [executor.submit("abc", max_tokens=900) for _ in range(3)]
            await trio.sleep(0.1)
        assert all(handle.done() for handle in handles)
        with pytest.raises(RequestAborted, match="block"):
            await handles[0].result()
        with pytest.raises(trio.ClosedResourceError):
            executor.submit("abc")
        await assert_idle(engine)


async def test_exceptions_of_the_block_come_out_as_they_are(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        group = ExceptionGroup("mine", [ValueError("mine")])
        for error in (KeyError("mine"), group):
            with pytest.raises(type(error)) as caught:
                async with engine.submissions() as executor:
                    executor.submit("abc", max_tokens=900)
                    await trio.sleep(0.05)
                    raise error
            assert caught.value is error
        with trio.move_on_after(0.1) as scope:
            async with engine.submissions() as executor:
                await executor.submit("abc", max_tokens=900).result()
        assert scope.cancelled_caught
        await assert_idle(engine)


async def test_errors(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker, max_num_seqs=1, max_num_queued_reqs=1) as engine:
        async with engine.submissions() as executor:
            with pytest.raises(InvalidRequest, match="max_tokens"):
                executor.submit("abc", max_tokens=-1)
            handles = [executor.submit("abc", max_tokens=5) for _ in range(6)]
            failed = 0
            for handle in handles:
                try:
                    await handle.result()
                except QueueFull:
                    failed += 1
            assert failed == 5 or failed == 4
            assert len((await executor.submit("abc", max_tokens=5).result()).token_ids) == 5
        await assert_idle(engine)
