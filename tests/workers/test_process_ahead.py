"""The process of the first worker, which starts before there is an engine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import trio

from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig, ModelLoadError, open_engine
from trioserve.engine.worker_start import WorkerProcesses
from trioserve.protocol.errors import NoRoomForWorker
from trioserve.workers import process as worker_process
from trioserve.workers.process import Workers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("tiny"))


def workers_of(path: Path) -> Workers:
    (workers,) = WorkerProcesses.of(EngineConfig(str(path)), path, None, None).first
    return workers


_others: set[int] = set()
"""Processes that other tests have started."""


@pytest.fixture(autouse=True)
def others() -> None:
    """Note the processes that other tests have started."""
    _others.clear()
    _others.update(each.pid for each in psutil.Process().children())


def started() -> list[int]:
    """Return the processes that this one has started since the test began."""
    return [each.pid for each in psutil.Process().children() if each.pid not in _others]


async def test_the_first_worker_takes_the_process_and_the_next_has_its_own(tiny: Path) -> None:
    workers = workers_of(tiny)
    async with workers.process_ahead():
        (ahead,) = started()
        async with workers.open() as (_, first):
            assert first.pid == ahead
            assert started() == [ahead]
        assert started() == []
        async with workers.open() as (_, second):
            assert started() == [second.pid] != [ahead]
    assert started() == []


async def test_a_process_that_is_not_taken_ends_at_once(tiny: Path) -> None:
    workers = workers_of(tiny)
    before = trio.current_time()
    with pytest.raises(ModelLoadError, match="no model"):
        async with workers.process_ahead():
            assert len(started()) == 1
            raise ModelLoadError("no model")
    assert started() == []
    assert trio.current_time() - before < worker_process.QUIT_GRACE


async def test_a_process_that_can_not_be_started_is_the_first_workers_error(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "worker_command", lambda _: (["/nowhere"], {}))
    workers = workers_of(tiny)
    async with workers.process_ahead():
        with pytest.raises(NoRoomForWorker, match="the worker can't be started"):
            async with workers.open():
                pass


async def test_an_engine_opens_when_all_that_runs_while_it_loads_is_done(tiny: Path) -> None:
    done = trio.Event()

    def call() -> None:
        trio.from_thread.run(trio.sleep, 0.1)
        trio.from_thread.run_sync(done.set)

    async with open_engine(str(tiny), while_loading=call):
        assert done.is_set()
