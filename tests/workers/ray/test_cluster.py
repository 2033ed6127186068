"""Engines with workers that Ray starts, on a cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from tests.faults.stage import serve_here
from tests.support.engines import assert_idle, open_compiled_engine
from tests.support.other_hosts import TOKENS, ask, leave_at, told, wait_states
from tests.support.rank_engines import prompt
from tests.support.tiny_encoders import make_encoder
from tests.support.tiny_models import make_tiny
from trioserve import Engine, EngineError, ModelLoadError, open_engine
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.wire import MockSteps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


def node_options() -> dict[str, int]:
    """Return the options of a node with one CPU.

    With ports of its own a node doesn't wait for those of its helpers, which it does for 15 seconds
    only, too few on a busy machine.
    """
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [each.getsockname()[1] for each in (one, other)]
    names = ("metrics_agent_port", "runtime_env_agent_port")
    return {"num_cpus": 1, "num_gpus": 0, **dict(zip(names, ports, strict=True))}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster  # takes seconds, which other tests needn't wait for

        head = {**node_options(), "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        try:
            cluster.add_node(**node_options())
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.asynccontextmanager
async def open_ray_engine(model: Path, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine whose workers are actors; none is left at the end.

    They compute nothing, if ``options`` don't say otherwise.
    """
    common = {"data_parallel_size": 2, "device": "cpu", "worker_link_timeout": 2.0}
    common |= {"distributed_executor_backend": "ray", "routing_policy": "round_robin"}
    options = {**common, "mock": MockSteps(step_seconds=0.01), **options}
    try:
        async with open_engine(str(model), **options) as engine:
            yield engine
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(60):
            while actors() or drivers():
                await trio.sleep(0.05)
        assert not actors()
        assert not drivers()


def processes(word: str) -> list[psutil.Process]:
    """Return the processes with ``word`` in their command that this one has started."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def actors() -> list[psutil.Process]:
    return processes("ray::WorkerActor")


def commands_below(actor: psutil.Process) -> str:
    """Return the commands of the processes that an actor has started."""
    return " ".join(word for each in actor.children() for word in each.cmdline())


def drivers() -> list[psutil.Process]:
    return processes("trioserve.workers.ray.driver")


async def ask_while(engine: Engine, loss: Any) -> list[list[int]]:
    """Ask eight times, call ``loss`` meanwhile, and wait until a worker is lost."""
    answers: list[list[int]] = []

    async def ask_all() -> None:
        answers.extend(await ask(engine, 8, 200))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_all)
        while not all(each.num_running for each in engine.workers):
            await trio.sleep(0.01)
        await loss()
        while all(each.state == "running" for each in engine.workers):
            await trio.sleep(0.01)
    return answers


async def test_actors_compute_and_are_started_again(
    model: Path, cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_engine(
        str(model), mock=MockSteps(step_seconds=0.001), device="cpu", num_threads=1
    ) as engine:
        alone, long = await ask(engine), await ask(engine, 4, 200)

    async with open_ray_engine(model) as engine:
        assert [each.state for each in engine.workers] == ["running", "running"]
        assert await ask(engine, 8) == [*alone, *alone]
        assert min(each.num_steps for each in engine.workers) >= TOKENS

        # Clients close their connections.
        leave = trio.Event()
        async with serve_here(engine) as port, trio.open_nursery() as nursery:
            for stream in (True, False) * 2:
                nursery.start_soon(functools.partial(leave_at, leave, port, stream=stream))
            while not all(each.num_running == 2 for each in engine.workers):
                await trio.sleep(0.01)
            leave.set()
        while engine.statistics().scheduler.num_running:
            await trio.sleep(0.01)
        await assert_idle(engine)

        async def kill() -> None:
            actors()[0].kill()

        assert await ask_while(engine, kill) == [*long, *long]
        await wait_states(engine, "running", "running")
        assert sum(each.restarts for each in engine.workers) == 1
        assert await ask(engine, 8) == [*alone, *alone]

        # A node is lost; its worker waits for room, and starts on the next node.
        node = cluster.worker_nodes.copy().pop()

        async def lose() -> None:
            await trio.to_thread.run_sync(cluster.remove_node, node)

        assert await ask_while(engine, lose) == [*long, *long]
        await trio.to_thread.run_sync(lambda: cluster.add_node(**node_options()))
        await wait_states(engine, "running", "running")
        assert sum(each.restarts for each in engine.workers) == 2

        # The process that speaks with Ray is lost, and its actors with it.
        drivers()[0].kill()
        while not told(caplog, "Ray was lost"):
            await trio.sleep(0.01)
        while sum(each.restarts for each in engine.workers) < 4:
            await trio.sleep(0.01)
        await wait_states(engine, "running", "running")
        assert await ask(engine, 8) == [*alone, *alone]
        await assert_idle(engine)


async def test_a_worker_of_two_hosts_answers_as_one_process(model: Path, cluster: Any) -> None:
    """Each node has a stage. The actor of the first one is lost, so both are replaced."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
    async with open_compiled_engine(model) as engine:
        expected = (await engine.complete(prompt(1), **asked)).token_ids
    options = {"nnodes": 2, "pipeline_parallel_size": 2, "dtype": "auto"}
    async with open_ray_engine(
        model, **options, data_parallel_size=1, mock=None, worker_link_timeout=20.0
    ) as engine:
        assert not processes("PRIVATE KEY")  # in a command line
        first, second = sorted(actors(), key=lambda each: "--node" in commands_below(each))
        found: list[int] = []
        async with engine.generate(prompt(1), **asked) as stream:
            async for delta in stream:
                found += delta.token_ids
                if len(found) == 10:
                    first.kill()
        assert found == list(expected)
        assert not second.is_running()
        assert len(actors()) == 2
        assert engine.statistics().worker_restarts == 1
        await assert_idle(engine)


async def test_workers_are_added_and_removed_in_the_same_places(model: Path, cluster: Any) -> None:
    # One more worker than there is room for: it is refused when this time is over.
    async with open_ray_engine(model, data_parallel_size=1, worker_start_timeout=30.0) as engine:
        report = await engine.add_worker()
        assert (report.index, report.state) == (1, "running")
        with trio.move_on_after(1.0) as gave_up:
            await engine.add_worker()
        assert gave_up.cancelled_caught
        await engine.remove_worker(0)
        while len(actors()) > 1:
            await trio.sleep(0.01)
        report = await engine.add_worker()
        assert report.index == 2
        assert len(await ask(engine)) == 4


async def test_too_few_resources_are_refused_by_name(model: Path, cluster: Any) -> None:
    reason = r"Ray has no room for 3 workers with 1 CPU each: \d of 2 CPUs free on 2 nodes, for 1 s"
    with pytest.raises(EngineError, match=reason):
        async with open_ray_engine(model, data_parallel_size=3, worker_start_timeout=1.0):
            pass
    reason = "Ray has no room for 1 worker with 1 GPU and 1 CPU each: 0 of 0 GPUs"
    with pytest.raises(EngineError, match=reason):
        async with open_ray_engine(
            model, data_parallel_size=1, device="cuda", worker_start_timeout=1.0
        ):
            pass


async def test_a_start_that_is_cancelled_leaves_nothing(model: Path, cluster: Any) -> None:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            async with open_ray_engine(model):
                raise AssertionError("it was cancelled")

        nursery.start_soon(run)
        while not drivers():
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_a_cluster_of_its_own_is_started_and_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    before = len(processes("raylet"))
    async with open_ray_engine(model, data_parallel_size=1) as engine:
        assert len(processes("raylet")) > before
        assert engine.worker_group.port is not None
        assert engine.worker_group.port.bound.startswith("127.0.0.1:")
        with pytest.raises(EngineError, match="Ray has no room for 1 worker with"):
            await engine.add_worker()
        assert len(await ask(engine)) == 4
        # The engine's process dies: nothing tells the process for Ray to end but its input.
        os.kill(drivers()[0].pid, signal.SIGSTOP)
        os.kill(drivers()[0].pid, signal.SIGKILL)
        while len(processes("raylet")) > before:
            await trio.sleep(0.01)
    assert len(processes("raylet")) == before


async def test_a_cluster_that_is_not_there_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("trioserve.workers.ray.port.END_GRACE", 0.5)
    monkeypatch.setattr("trioserve.workers.ray.port.CONNECT_TIMEOUT", 2.0)
    with pytest.raises(EngineError, match="Ray can't be used: no cluster answered within 2 s"):
        async with open_ray_engine(model):
            pass


async def test_without_ray_or_with_an_encoder_it_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder("bert", tmp_path / "bert")
    with pytest.raises(ModelLoadError, match="ray isn't for an encoder: leave it out"):
        async with open_ray_engine(encoder):
            pass
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(TrioserveError, match="one for Ray Client"):
        async with open_ray_engine(model):
            pass
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TrioserveError, match=r"install trioserve\[ray\]"):
        async with open_ray_engine(model):
            pass
