"""The devices of workers: by the options, by number, and those of workers that are added."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig, open_engine
from trioserve.engine.core_shares import CoreShare
from trioserve.engine.engine_worker import EngineWorker, MakeWorker
from trioserve.engine.host_devices import HostDevices
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.protocol.errors import CallFailed, InvalidRequest, ModelLoadError
from trioserve.protocol.machine import Machine
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker
from trioserve.workers import Link

SHARES = [CoreShare((0, 1), 2), CoreShare((2, 3), 2)]


def devices(*listed: str, default: str = "auto", num_gpus: int = 1) -> HostDevices:
    return HostDevices(listed, default, SHARES, num_gpus)


def taken(host: HostDevices, *indexes: int) -> list[str]:
    return [host.take(index).device for index in indexes]


def test_each_worker_has_a_gpu_of_its_own() -> None:
    host = devices()
    assert taken(host, 0, 1) == ["auto:0", "auto:1"]
    # Workers of other hosts had the numbers between.
    assert taken(host, 7) == ["auto:2"]
    host.free(1)
    host.free(1)
    assert taken(host, 8, 9) == ["auto:1", "auto:3"]
    assert taken(devices(default="cuda"), 4) == ["cuda:0"]


def test_devices_of_the_options_are_taken_in_their_order() -> None:
    host = devices("cuda:2", "cuda:0")
    assert taken(host, 0, 1) == ["cuda:2", "cuda:0"]
    with pytest.raises(InvalidRequest, match=r"^all of worker_devices have workers \(cuda:2, cuda"):
        host.take(2)
    assert host.take(3, "cuda:1").device == "cuda:1"
    host.free(0)
    assert taken(host, 4) == ["cuda:2"]


def test_a_gpu_is_given_to_one_worker() -> None:
    host = devices()
    assert taken(host, 0) == ["auto:0"]
    assert host.take(1, "cuda:1").device == "cuda:1"
    assert taken(host, 2) == ["auto:2"]
    with pytest.raises(InvalidRequest, match="cuda:1 has worker 1 already: remove") as caught:
        host.take(3, "cuda:1")
    assert caught.value.param == "device"
    with pytest.raises(InvalidRequest, match="cuda:0 has worker 0 already"):
        host.take(3, "cuda:0")
    with pytest.raises(InvalidRequest, match=r"^device must be a GPU .*; got 'gpu'"):
        host.take(3, "gpu")
    host.free(1)
    assert taken(host, 4) == ["auto:1"]


def test_a_worker_of_several_ranks_has_gpus_in_a_row() -> None:
    host = devices(num_gpus=2)
    assert taken(host, 0, 1) == ["auto:0", "auto:2"]
    assert host.take(2, "cuda:5").device == "cuda:5"
    assert taken(host, 3) == ["auto:8"]  # of 4 and 5, and of 6 and 7, another has one
    for device, owner in (("cuda:3", 1), ("cuda:4", 2), ("cuda:6", 2)):
        with pytest.raises(InvalidRequest, match=f"{device} has worker {owner} already"):
            host.take(4, device)
    assert host.take(4, "cpu").device == "cpu"
    assert taken(devices("cuda:4", "cuda:2", num_gpus=2), 0, 1) == ["cuda:4", "cuda:2"]


def test_a_stage_of_a_worker_has_gpus_of_its_own() -> None:
    config = EngineConfig("m", pipeline_parallel_size=2, tensor_parallel_size=2)
    assert taken(HostDevices.of(config, Machine()), 0, 1) == ["auto:0", "auto:4"]


def test_workers_on_a_cpu_have_shares_of_its_cores() -> None:
    for default in ("cpu", "auto"):
        host = devices(default=default)
        found = [host.take(index) for index in range(3)]
        assert [each.cores for each in found] == [(0, 1), (2, 3), (0, 1)]
        assert {each.num_threads for each in found} == {2}
        host.free(1)
        assert host.take(5).cores == (2, 3)
    named = host.take(6, "cpu:1+4-5")
    assert (named.device, named.cores, named.num_threads) == ("cpu", (1, 4, 5), 0)
    host = devices("cpu:0-2", "cpu:3")
    assert [host.take(index).cores for index in range(2)] == [(0, 1, 2), (3,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker_devices": ("cuda:0", "cuda:0")}, "worker_devices has cuda:0 twice"),
        (
            {"worker_devices": ("cuda:0", "cpu", "cuda:1"), "tensor_parallel_size": 2},
            "worker_devices has cuda:0 and cuda:1, and a worker has 2 GPUs",
        ),
        (
            {
                "worker_devices": ("cuda:0", "cuda:3"),
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
            },
            "worker_devices has cuda:0 and cuda:3, and a worker has 4 GPUs",
        ),
        (
            {"worker_devices": ("cuda:0", "cuda:1"), "data_parallel_size": 3},
            "worker_devices has 2 devices, and --data-parallel-size is 3: name",
        ),
        (
            {"worker_devices": "cpu:0-3", "device": "cuda"},
            "worker_devices has cpu:0-3, and --device is cuda: leave one out",
        ),
        ({"worker_devices": ("cpu:a",)}, r"worker_devices must be a GPU .*; got 'cpu:a'$"),
        ({"worker_devices": ("cuda",)}, r"worker_devices must be a GPU .*; got 'cuda'$"),
    ],
)
def test_options_that_disagree_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}") as caught:
        EngineConfig("m", **options)
    assert caught.value.param == "worker_devices"


def test_the_number_of_workers_follows_from_the_devices() -> None:
    assert EngineConfig("m", worker_devices=("cuda:1", "cuda:3")).num_workers == 2
    named = EngineConfig("m", worker_devices=("cpu", "cpu"), data_parallel_size=2)
    assert named.num_workers == 2
    assert attrs.evolve(named, worker_devices=(), data_parallel_size=5).num_workers == 5


async def test_a_device_is_free_when_its_worker_is_gone_for_good(autojump_clock: object) -> None:
    given: list[str | None] = []
    running: set[int] = set()
    freed: list[int] = []
    fails = False

    def maker(config: EngineConfig, metrics: Metrics) -> MakeWorker:
        def make(index: int, device: str | None = None) -> EngineWorker:
            @contextlib.asynccontextmanager
            async def opened() -> AsyncIterator[tuple[Link, wire.Ready]]:
                if fails:
                    raise ModelLoadError("there is no room for it")
                async with run_fake_worker(FakeWorker(), config) as pair:
                    running.add(index)
                    try:
                        yield pair
                    finally:
                        with trio.CancelScope(shield=True):
                            await trio.sleep(1)
                        running.remove(index)

            def free() -> None:
                assert index not in running
                freed.append(index)

            made = EngineWorker.of(index, config, metrics, opened)
            made.free_device = free
            given.append(device)
            return made

        return make

    async with open_fake_engine(worker_maker=maker) as engine:
        await engine.add_worker("cuda:1")
        assert freed == []
        fails = True
        with pytest.raises(CallFailed, match="there is no room for it"):
            await engine.add_worker()
        assert freed == [2]
        await engine.remove_worker(0)
        assert freed == [2, 0]
    assert given == [None, "cuda:1", None]


async def test_workers_are_bound_to_the_cores_of_their_devices(tmp_path: Path) -> None:
    model = make_tiny("qwen3", tmp_path)
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    async with open_engine(
        str(model),
        mock=wire.MockSteps(step_seconds=0.001),
        worker_devices=(f"cpu:{first}", f"cpu:{last}"),
    ) as engine:
        for report, core in zip(engine.workers, (first, last), strict=True):
            assert report.pid is not None
            assert os.sched_getaffinity(report.pid) == {core}
        await engine.complete([3, 4], max_tokens=4)
        with pytest.raises(InvalidRequest, match="all of worker_devices have workers"):
            await engine.add_worker()
        with pytest.raises(CallFailed, match=f"can't have the cores 9999: .* use {first}"):
            await engine.add_worker("cpu:9999")
        await engine.remove_worker(0)
        assert [each.index for each in engine.workers] == [1]
        added = await engine.add_worker()
        assert added.pid is not None
        assert os.sched_getaffinity(added.pid) == {first}


async def test_each_rank_of_a_worker_is_bound_to_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    nodes = [[allowed[0]], [allowed[-1]]]
    monkeypatch.setattr(Machine, "nodes", lambda _: nodes)
    options: dict[str, Any] = {"device": "cpu", "pipeline_parallel_size": 2}
    async with open_engine(str(make_tiny("qwen3", tmp_path)), **options) as engine:
        (report,) = engine.workers
        assert report.pid is not None
        found = [os.sched_getaffinity(pid) for pid in (report.pid, *report.rank_pids)]
        assert found == [set(node) for node in nodes]
        await engine.complete([3, 4], max_tokens=4)
