"""A model that takes no time to load, for ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import pytest

from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.engine.offline import engine_thread
from trioserve.protocol.errors import ModelLoadError
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


@attrs.define
class FakeModel:
    """The fake model of a test."""

    step_time: float = 0.0
    """Seconds of the worker for a step."""
    is_open: bool = False
    """An engine is open."""


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """Have every ``LLM`` open a fake engine; one for the model ``missing`` can't be loaded."""
    fake = FakeModel()

    @contextlib.asynccontextmanager
    async def open_engine(config: EngineConfig) -> AsyncIterator[Engine]:
        if config.model == "missing":
            raise ModelLoadError("there is no such model")
        given = attrs.asdict(config, filter=lambda field, value: value != field.default)
        del given["model"]
        async with open_fake_engine(
            lambda: FakeWorker(step_time=fake.step_time), **given
        ) as engine:
            fake.is_open = True
            try:
                yield engine
            finally:
                fake.is_open = False

    monkeypatch.setattr(engine_thread, "open_engine", open_engine)
    return fake
