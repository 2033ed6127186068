"""The garbage collector of a server's process: it seldom works while that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from trioserve.cli import serve as serve_module
from trioserve.config import EngineConfig, ServerConfig


@pytest.fixture
def _collector_of_a_new_process() -> Iterator[None]:
    """The collector as Python starts it; tests have another one."""
    threshold = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("_collector_of_a_new_process")
def test_it_collects_seldom_while_the_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    async def fake_serve(*_: Any, task_status: trio.TaskStatus[list[str]], **__: Any) -> int:
        seen.append((gc.get_threshold()[0], gc.get_freeze_count()))
        task_status.started(["http://127.0.0.1:1"])
        seen.append((gc.get_threshold()[0], gc.get_freeze_count()))
        return 0

    monkeypatch.setattr(serve_module, "serve", fake_serve)
    before = gc.get_threshold(), gc.get_freeze_count()
    config = ServerConfig(engine=EngineConfig("a-model"), served_model_name="name")
    assert trio.run(serve_module.run_server, config) == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before == (before[0], 0)
    (threshold, none_frozen), (same, frozen) = seen
    assert threshold == same > 10 * before[0][0]
    assert none_frozen == 0
    assert frozen > 10_000
