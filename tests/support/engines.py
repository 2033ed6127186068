"""Engines for the tests, and what must be true of one that has nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import trio

from tests.faults.leftovers import nothing_held
from trioserve import Engine, open_engine

__all__ = ["assert_idle", "open_tiny_engine", "worker_of"]


@contextlib.asynccontextmanager
async def open_tiny_engine(folder: Path, **options: Any) -> AsyncIterator[Engine]:
    """Open a real engine with a real worker process over a tiny model in ``folder``."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, **options}
    async with open_engine(str(folder), **options) as engine:
        yield engine


async def assert_idle(engine: Engine, *, within: float = 10.0) -> None:
    """Wait until the engine has nothing to do, then assert that nothing is held anywhere."""
    await nothing_held(engine, within=within)


async def worker_of(engine: Engine) -> psutil.Process:
    """Return the engine's worker process, once there is one that runs."""
    while (pid := engine.worker_life().pid) is None:
        await trio.sleep(0.001)
    return psutil.Process(pid)
