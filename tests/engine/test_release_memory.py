"""The worker is sent away with its memory, and comes back: requests know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from tests.support.engines import assert_idle, open_compiled_engine
from tests.support.tiny_models import make_tiny
from trioserve import DeadlineExceeded, Engine

PROMPT = [3 + (7 * place) % 200 for place in range(40)]
SAMPLING: dict[str, Any] = {"max_tokens": 150, "temperature": 0.9, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama2", tmp_path_factory.mktemp("llama2"), max_position_embeddings=2048, head_dim=32
    )


def workers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "gpu" in each.cmdline()]


async def test_a_stream_goes_on_afterwards(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        expected = (await engine.complete(PROMPT, **SAMPLING)).token_ids
        tokens: list[int] = []
        late: list[tuple[int, ...]] = []

        async def come_late() -> None:
            late.append((await engine.complete(PROMPT, **SAMPLING)).token_ids)

        async with trio.open_nursery() as nursery:
            async with engine.generate(PROMPT, **SAMPLING) as stream:
                async for chunk in stream:
                    tokens.extend(chunk.token_ids)
                    if len(tokens) >= 20 and not late and engine.healthy and len(tokens) < 60:
                        await engine.release_memory()
                        await engine.release_memory()  # Again does nothing.
                        assert workers() == []
                        assert not engine.healthy
                        nursery.start_soon(come_late)
                        await trio.testing.wait_all_tasks_blocked(0.01)
                        assert late == []
                        engine.check_integrity()
                        await engine.resume_memory()
                        await engine.resume_memory()
                        assert len(workers()) == 1
                        late_came = True
                        break
                async for chunk in stream:
                    tokens.extend(chunk.token_ids)
        assert late_came
        assert tuple(tokens) == expected
        assert late == [expected]
        # No worker has died.
        assert engine.statistics().worker_restarts == 0
        await assert_idle(engine)


async def test_deadlines_go_on_and_the_engine_can_be_left(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        await engine.release_memory()
        with pytest.raises(DeadlineExceeded):
            await engine.complete(PROMPT, timeout=0.05, **SAMPLING)
        assert workers() == []
    assert workers() == []


async def test_over_and_over_with_requests_under_way(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        expected = (await engine.complete(PROMPT, **SAMPLING)).token_ids
        results: list[tuple[int, ...]] = []
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                for _ in range(3):
                    nursery.start_soon(collect, engine, results)
                await trio.sleep(0.05)
                await engine.release_memory()
                await engine.resume_memory()
        assert results == [expected] * 9
        assert engine.statistics().worker_restarts == 0
        await assert_idle(engine)


async def collect(engine: Engine, results: list[tuple[int, ...]]) -> None:
    results.append((await engine.complete(PROMPT, **SAMPLING)).token_ids)


async def test_a_worker_that_is_still_loading_is_sent_away(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        expected = (await engine.complete(PROMPT, **SAMPLING)).token_ids
        (worker,) = workers()
        worker.kill()
        with trio.fail_after(20):
            while engine.healthy:
                await trio.sleep(0.005)
        with trio.fail_after(60):
            await engine.release_memory()
            assert workers() == []
            await engine.resume_memory()
        assert (await engine.complete(PROMPT, **SAMPLING)).token_ids == expected
