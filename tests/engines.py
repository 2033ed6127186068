"""Engines for the tests, and what must be true of one that has nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

from trioserve import Engine, open_engine

__all__ = ["assert_idle", "open_tiny_engine"]


@contextlib.asynccontextmanager
async def open_tiny_engine(folder: Path, **options: Any) -> AsyncIterator[Engine]:
    """A real engine with a real worker process over a tiny model in ``folder``."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, **options}
    async with open_engine(str(folder), **options) as engine:
        yield engine


async def assert_idle(engine: Engine, *, within: float = 10.0) -> None:
    """Wait until the engine has nothing to do, then assert that nothing is held anywhere.

    Looks at the page pool and the queue on this side and at the slots on the worker's.
    """
    with trio.fail_after(within):
        while True:
            statistics = engine.statistics()
            scheduler = statistics.scheduler
            worker = await engine.call_worker("statistics")
            busy = (
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.plans_in_flight,
                scheduler.pages_held,
                statistics.num_tokenizing,
                statistics.num_streams,
                statistics.stream_bytes,
                worker["open_slots"],
            )
            if not any(busy):
                break
            await trio.sleep(0.01)
    engine.check_integrity()
    assert scheduler.pages_free + scheduler.pages_cached == scheduler.pages_total
