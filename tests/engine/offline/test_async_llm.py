"""``AsyncLLM``: the engine in a thread, its callers in an asyncio loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.engine.offline.conftest import FakeModel
from trioserve import AsyncLLM, EngineError, InvalidRequest, ModelLoadError, RequestAborted

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


async def wait_until_idle(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + 60
    while True:
        statistics = await llm.statistics()
        if not statistics.num_streams and not statistics.scheduler.pages_held:
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_results(fake_model: FakeModel) -> None:
    async def main() -> None:
        async with AsyncLLM("fake") as llm:
            prompts = ["one", "two", "three"]
            expected = await llm.generate(prompts, max_tokens=5, seed=1)
            handles = [llm.generate_async(each, max_tokens=5, seed=1) for each in prompts]
            results = await asyncio.gather(*(handle.result() for handle in handles))
            assert [each.token_ids for each in results] == [each.token_ids for each in expected]
            texts = []
            for prompt in prompts:
                parts = [part async for part in llm.stream(prompt, max_tokens=5, seed=1)]
                assert parts[-1].text == "".join(part.text_diff for part in parts)
                texts.append(parts[-1].text)
            assert texts == [each.text for each in expected]
            hello = [{"role": "user", "content": "hello"}]
            (answer,) = await llm.chat(hello, max_tokens=2)
            assert len(answer.token_ids) == 2
        assert not fake_model.is_open

    run(main)


def test_several_tasks_read_one_handle(fake_model: FakeModel) -> None:
    fake_model.step_time = 0.005

    async def main() -> None:
        async with AsyncLLM("fake") as llm:
            handle = llm.generate_async("abc", max_tokens=10)

            async def read() -> str:
                return "".join([part.text_diff async for part in handle])

            texts = await asyncio.gather(read(), read())
            assert texts == [(await handle.result()).text] * 2

    run(main)


@pytest.mark.parametrize("way", ["cancelled task", "break", "cancel", "block", "dropped"])
def test_what_ends_a_request(fake_model: FakeModel, way: str) -> None:
    fake_model.step_time = 0.002

    async def main() -> None:
        async with AsyncLLM("fake") as llm:
            if way == "cancelled task":
                began = asyncio.Event()

                async def read() -> None:
                    async for _ in llm.stream("abc", **LONG):
                        began.set()

                task = asyncio.create_task(read())
                await began.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "break":
                async for _ in llm.stream("abc", **LONG):
                    break
            else:
                handle = llm.generate_async("abc", **LONG)
                async for _ in handle:
                    break
                assert (await llm.statistics()).num_streams == 1
                if way == "block":
                    async with handle:
                        pass
                elif way == "cancel":
                    handle.cancel()
                if way == "dropped":
                    del handle
                    gc.collect()
                else:
                    with pytest.raises(RequestAborted, match="cancelled"):
                        await handle.result()
            await wait_until_idle(llm)

    run(main)


def test_cancelling_a_call_aborts_all_of_it(fake_model: FakeModel) -> None:
    fake_model.step_time = 0.002

    async def main() -> None:
        async with AsyncLLM("fake") as llm:
            task = asyncio.create_task(llm.generate(["a", "b"], **LONG))
            while (await llm.statistics()).num_streams < 2:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until_idle(llm)

    run(main)


def test_waits_that_end_leave_the_request(fake_model: FakeModel) -> None:
    fake_model.step_time = 0.02

    async def main() -> None:
        async with AsyncLLM("fake") as llm:
            handle = llm.generate_async("abc", max_tokens=20)
            with pytest.raises(TimeoutError, match=r"after 0\.01 seconds"):
                await handle.result(timeout=0.01)
            waiting = asyncio.create_task(handle.result())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not handle.done()
            assert len((await handle.result()).token_ids) == 20

    run(main)


def test_errors(fake_model: FakeModel) -> None:
    async def main() -> None:
        with pytest.raises(ModelLoadError):
            async with AsyncLLM("missing"):
                raise AssertionError
        async with AsyncLLM("fake") as llm:
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await llm.generate_async("abc", max_tokens=-1).result()
            with pytest.raises(InvalidRequest, match="max_tokens"):
                async for _ in llm.stream("abc", max_tokens=-1):
                    pass
            await llm.pause("wait")
            assert await llm.is_paused()
            held = llm.generate_async("abc", max_tokens=2)
        with pytest.raises(EngineError, match="closed"):
            await held.result()
        with pytest.raises(EngineError, match="closed"):
            await llm.statistics()
        await llm.close()

    run(main)


def test_a_load_that_is_cancelled_leaves_nothing(fake_model: FakeModel) -> None:
    async def main() -> None:
        async def load() -> None:
            async with AsyncLLM("fake"):
                await asyncio.sleep(3600)

        task = asyncio.create_task(load())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not fake_model.is_open

    run(main)


def test_another_task_goes_on_while_a_model_is_loaded(fake_model: FakeModel) -> None:
    """Check that the loop isn't blocked by a call, however long it takes."""
    fake_model.step_time = 0.02

    async def main() -> None:
        async with AsyncLLM("fake") as llm:
            task = asyncio.create_task(llm.generate("abc", max_tokens=10))
            turns = 0
            while not task.done():
                turns += 1
                await asyncio.sleep(0.001)
            assert turns > 10

    run(main)
