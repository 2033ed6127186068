"""The placement of actors: resources, shortages and ends, over a Ray that is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trioserve.workers.ray.driver import FIRST_WARNING, ActorPlacement, cpu_share, one_line
from trioserve.workers.ray.messages import (
    ActorEnded,
    AgentSetup,
    NoRoomYet,
    PlaceActors,
    RayEvent,
    StopActor,
)


def setup(name: str, **fields: Any) -> AgentSetup:
    texts = dict.fromkeys(("engine", "authority", "certificate", "key", "model"), "x")
    return AgentSetup(
        id=name, **{"revision": None, "device": "auto", "num_threads": None, **texts, **fields}
    )


def order(*setups: AgentSetup, timeout: float | None = 9, num_gpus: int = 1) -> PlaceActors:
    return PlaceActors(
        setups=list(setups), num_sharing=len(setups), timeout=timeout, num_gpus=num_gpus
    )


class RecordedRay:
    """The part of Ray that :class:`ActorPlacement` calls, for nodes with these resources."""

    def __init__(self, *nodes: dict[str, float], free: dict[str, float] | None = None) -> None:
        self.alive = [{"Alive": True, "Resources": node} for node in nodes]
        self.free = free
        self.groups: list[list[dict[str, float]]] = []
        self.removed: list[Any] = []
        self.state = "PENDING"
        self.util = SimpleNamespace(
            placement_group=self._group,
            placement_group_table=lambda _: {"state": self.state},
            remove_placement_group=self.removed.append,
        )

    def _group(self, bundles: list[dict[str, float]]) -> list[dict[str, float]]:
        self.groups.append(bundles)
        return bundles

    def nodes(self) -> list[dict[str, Any]]:
        return [*self.alive, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def cluster_resources(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for node in self.alive:
            for name, number in node["Resources"].items():
                total[name] = total.get(name, 0) + number
        return total

    def available_resources(self) -> dict[str, float]:
        return self.cluster_resources() if self.free is None else self.free


def placement(ray: RecordedRay, *, is_local: bool = False) -> tuple[ActorPlacement, list[RayEvent]]:
    events: list[RayEvent] = []
    return ActorPlacement(ray, is_local, events.append), events


@pytest.mark.parametrize(
    ("cpus", "count", "share"),
    [([4], 2, 2), ([8, 4], 2, 4), ([8, 4], 3, 4), ([3, 3], 2, 3), ([1, 1], 3, 1), ([], 2, 1)],
)
def test_workers_share_the_cpus_of_nodes(cpus: list[int], count: int, share: int) -> None:
    assert cpu_share(cpus, count) == share


@pytest.mark.parametrize(
    ("options", "bundle"),
    [
        ({}, {"GPU": 1, "CPU": 1}),
        ({"device": "cuda"}, {"GPU": 1, "CPU": 1}),
        ({"device": "cpu"}, {"CPU": 8}),
        ({"device": "cpu", "num_threads": 3}, {"CPU": 3}),
    ],
)
def test_a_worker_has_a_gpu_or_cpus(options: dict[str, Any], bundle: dict[str, float]) -> None:
    ray = RecordedRay({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0})
    placed, _ = placement(ray)
    placed.take(order(setup("a", **options), setup("b", **options), timeout=9))
    assert ray.groups == [[bundle, bundle]]


def test_a_worker_of_several_ranks_has_a_gpu_for_each() -> None:
    ray = RecordedRay({"CPU": 8.0, "GPU": 4.0})
    placed, _ = placement(ray)
    placed.take(order(setup("a"), num_gpus=4))
    assert ray.groups == [[{"GPU": 4, "CPU": 1}]]


def test_a_device_is_chosen_by_what_the_cluster_has() -> None:
    ray = RecordedRay({"CPU": 4.0})
    placed, _ = placement(ray)
    placed.take(order(setup("a"), timeout=9))
    assert ray.groups == [[{"CPU": 4}]]


def test_a_cluster_of_its_own_without_room_is_refused_at_once() -> None:
    ray = RecordedRay({"CPU": 2.0})
    placed, events = placement(ray, is_local=True)
    placed.take(order(setup("a", device="cuda"), setup("b", device="cuda"), timeout=9))
    reason = (
        "Ray has no room for 2 workers with 1 GPU and 1 CPU each: "
        "0 of 0 GPUs and 2 of 2 CPUs free on 1 node"
    )
    assert events == [ActorEnded(id="a", reason=reason), ActorEnded(id="b", reason=reason)]
    assert not ray.groups


def test_a_shared_cluster_without_room_is_told_and_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("trioserve.workers.ray.driver.time.monotonic", lambda: now)
    ray = RecordedRay({"CPU": 4.0}, free={"CPU": 1.0})
    placed, events = placement(ray)
    placed.take(order(setup("a", num_threads=3), timeout=20))
    placed.look()
    assert not events
    reason = "Ray has no room for 1 worker with 3 CPUs each: 1 of 4 CPUs free on 1 node"
    now += FIRST_WARNING
    placed.look()
    placed.look()
    assert events == [NoRoomYet(reason=reason)]
    now += 20 - FIRST_WARNING
    placed.look()
    assert events[1:] == [ActorEnded(id="a", reason=f"{reason}, for 20 s")]
    assert ray.removed == ray.groups
    placed.look()
    assert len(events) == 2


def test_an_actor_that_is_stopped_before_it_has_room_leaves_nothing() -> None:
    ray = RecordedRay({"CPU": 4.0}, free={})
    placed, events = placement(ray)
    placed.take(order(setup("a"), timeout=20))
    placed.take(StopActor(id="a"))
    placed.take(StopActor(id="unknown"))
    assert ray.removed == ray.groups
    placed.look()
    assert not events


def test_an_error_of_ray_is_told_in_a_line() -> None:
    assert one_line(RuntimeError("Traceback:\n  line 3\nOSError: full\n")) == "OSError: full"
    assert one_line(ValueError()) == "ValueError"
