"""A server inside this program, engine and all, so that a script can look into it while it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.faults.processes import workers_of
from trioserve import Engine, ServerConfig, open_engine
from trioserve.http import create_app
from trioserve.http.server.server import serve_app


@contextlib.asynccontextmanager
async def serve_here(engine: Engine, **options: Any) -> AsyncIterator[int]:
    """Serve ``engine`` over HTTP on a free port, which is given, for as long as the block lasts."""
    config = ServerConfig(engine=engine.config, port=0, log_level="error", **options)
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        yield int(url.rpartition(":")[2])
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def engine_over(model: str, **options: Any) -> AsyncIterator[Engine]:
    """An engine with a worker process that computes ``model`` in float32 on one core."""
    defaults = {"device": "cpu", "dtype": "float32", "num_threads": 1}
    async with open_engine(model, **{**defaults, **options}) as engine:
        yield engine


def sole_worker() -> int | None:
    """The worker process of this program's engine, None while there is none."""
    return next(iter(workers_of(os.getpid())), None)


def tiny_model(folder: Path) -> str:
    """Write a small random model into ``folder``: for counts, not for words."""
    import torch

    from bench.random_model import TINY, write_model

    config = attrs.evolve(TINY, max_position_embeddings=4096)
    write_model(config, folder, torch.device("cpu"))
    return str(folder)
