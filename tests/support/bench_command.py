"""``trioserve bench`` as tests run it: in this process, and asking an engine without a model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from trioserve.cli import commands
from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

__all__ = ["EMBEDDED", "QUICK", "SHORT", "fake", "run"]

SHORT = ("--output-tokens", "6", "--num-prompts", "6")
QUICK = ("--input-tokens", "8", *SHORT)
EMBEDDED = ("--embedded", "fake", *QUICK)


@contextlib.asynccontextmanager
async def fake(config: EngineConfig, **_: Any) -> AsyncIterator[Engine]:
    """Open an engine without a model in place of the requested one."""
    async with open_fake_engine(
        lambda: FakeWorker(step_time=0.001), max_num_seqs=config.max_num_seqs
    ) as engine:
        yield engine


def run(*argv: str, code: int = 0) -> None:
    assert commands.main(["bench", *argv]) == code
