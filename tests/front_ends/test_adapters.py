"""Adapters over several front ends: one front end loads an adapter, and all serve it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.support.front_ends import FrontEnd, open_server
from trioserve import AdapterNotFound, InvalidRequest
from trioserve.testing import FakeWorker


async def test_whoever_loads_one_all_serve_it(tmp_path: Path) -> None:
    async with open_server(
        tmp_path, lambda: FakeWorker(step_time=0.001), lora_modules=["a=/a"], max_loras=2
    ) as server:
        first, second = server.front_ends

        async def tokens(front_end: FrontEnd, name: str, count: int = 9) -> tuple[int, ...]:
            completion = await front_end.engine.complete(
                "hello", adapter=name, max_tokens=count, seed=1
            )
            return completion.token_ids

        async def offered(front_end: FrontEnd, names: list[str]) -> None:
            with trio.fail_after(30):
                while [adapter.name for adapter in front_end.engine.adapters] != names:
                    await trio.sleep(0.001)

        for front_end in server.front_ends:
            await offered(front_end, ["a"])
        assert await tokens(first, "a") == await tokens(second, "a") != await tokens(first, "")
        await first.server_api.load_adapter("b", "/b")
        assert [adapter.name for adapter in first.engine.adapters] == ["a", "b"]
        await offered(second, ["a", "b"])
        assert await tokens(first, "b") == await tokens(second, "b") != await tokens(first, "a")
        with pytest.raises(InvalidRequest, match="is loaded already"):
            await second.server_api.load_adapter("b", "/c")
        with pytest.raises(InvalidRequest, match="/bad is bad") as caught:
            await second.server_api.load_adapter("c", "/bad")
        assert caught.value.param == "path"

        async with trio.open_nursery() as nursery:
            results: list[tuple[int, ...]] = []

            async def ask() -> None:
                results.append(await tokens(second, "a", 300))

            nursery.start_soon(ask)
            while server.engine_server.statistics().scheduler.num_running == 0:
                await trio.sleep(0.001)
            await first.server_api.unload_adapter("a")
            assert server.engine_server.statistics().scheduler.num_running == 0
        assert len(results[0]) == 300
        await offered(second, ["b"])
        for front_end in server.front_ends:
            with pytest.raises(AdapterNotFound, match="no adapter 'a' is loaded"):
                await tokens(front_end, "a")
        with pytest.raises(AdapterNotFound):
            await second.server_api.unload_adapter("a")
        await server.wait_nothing_held()
