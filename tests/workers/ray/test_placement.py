"""The placement of actors: resources, shortages and ends, over a Ray that is recorded."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest

from trioserve.protocol.certificates import Credentials
from trioserve.workers.ray.actor import hold_port
from trioserve.workers.ray.messages import (
    ActorEnded,
    AgentSetup,
    NoRoomYet,
    PlaceActors,
    RayEvent,
    StopActor,
)
from trioserve.workers.ray.placement import FIRST_WARNING, ActorPlacement, one_line
from trioserve.workers.ray.resources import cpu_share

WORKER, NODE_0, NODE = (Credentials(name, name, name) for name in ("worker", "node 0", "node"))


def setup(name: str, **fields: Any) -> AgentSetup:
    common = {"join": "engine:1", "tls": WORKER, "model": "m", "revision": None}
    return AgentSetup(id=name, **{**common, "device": "auto", "num_threads": None, **fields})


def order(*setups: AgentSetup, timeout: float | None = 9, num_gpus: int = 1) -> PlaceActors:
    return PlaceActors(
        setups=list(setups),
        node_tls=NODE,
        num_sharing=len(setups),
        timeout=timeout,
        num_gpus=num_gpus,
    )


class ActorLost(Exception):
    """Ray's error for a lost actor."""

    def __init__(self, *, actor_init_failed: bool = False) -> None:
        super().__init__("it died")
        self.actor_init_failed = actor_init_failed


@attrs.define(eq=False)
class Result:
    """The result of a call of an actor."""

    argument: AgentSetup | None
    value: Any = None


@attrs.define(eq=False)
class RecordedActor:
    """An actor, with its options and the results of its calls."""

    options: dict[str, Any]
    calls: list[Result] = attrs.field(factory=list)
    is_killed: bool = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=self._call)

    def _call(self, setup: bytes | None = None) -> Result:
        told = None if setup is None else msgspec.json.decode(setup, type=AgentSetup)
        self.calls.append(Result(told))
        return self.calls[-1]


class RecordedRay:
    """The part of Ray that :class:`ActorPlacement` calls, for nodes with these resources."""

    def __init__(self, *nodes: dict[str, float], free: dict[str, float] | None = None) -> None:
        self.alive = [{"Alive": True, "Resources": node} for node in nodes]
        self.free = free
        self.groups: list[list[dict[str, float]]] = []
        self.strategies: list[str] = []
        self.actors: list[RecordedActor] = []
        self.removed: list[Any] = []
        self.state = "PENDING"
        self.util = SimpleNamespace(
            placement_group=self._group,
            placement_group_table=lambda _: {"state": self.state},
            remove_placement_group=self.removed.append,
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda _, placement_group_bundle_index: (
                    placement_group_bundle_index
                )
            ),
        )
        self.exceptions = SimpleNamespace(RayActorError=ActorLost)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> list[dict[str, float]]:
        self.groups.append(bundles)
        self.strategies.append(strategy)
        return bundles

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._new(options)))

    def _new(self, options: dict[str, Any]) -> Any:
        def remote() -> RecordedActor:
            self.actors.append(RecordedActor(options))
            return self.actors[-1]

        return remote

    def wait(self, results: list[Result], timeout: float) -> tuple[list[Result], list[Result]]:
        return [each for each in results if each.value is not None], []

    def get(self, result: Result) -> Any:
        if isinstance(result.value, Exception):
            raise result.value
        return result.value

    def kill(self, actor: RecordedActor) -> None:
        actor.is_killed = True

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
    monkeypatch.setattr("trioserve.workers.ray.placement.time.monotonic", lambda: now)
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


@pytest.mark.parametrize(
    ("cpus", "num_workers", "share"),
    [
        ([16, 4], 1, 4),
        ([16, 4, 0], 1, 4),
        ([16], 1, 8),
        ([8, 8, 8], 3, 4),
        ([8, 8], 2, 4),
        ([4, 4], 8, 1),
        ([], 1, 1),
    ],
)
def test_nodes_of_a_worker_share_the_cpus_of_different_hosts(
    cpus: list[int], num_workers: int, share: int
) -> None:
    assert cpu_share(cpus, num_workers, num_nodes=2) == share


def over_two(name: str, **fields: Any) -> AgentSetup:
    return setup(name, num_nodes=2, nodes_tls=NODE_0, **fields)


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [(({"CPU": 8.0}, {"CPU": 9.0}), "STRICT_SPREAD"), (({"CPU": 16.0},), "SPREAD")],
)
def test_a_worker_of_several_hosts_has_a_group_with_a_bundle_for_each(
    nodes: tuple[dict[str, float], ...], strategy: str
) -> None:
    ray = RecordedRay(*nodes)
    placed, _ = placement(ray)
    placed.take(order(over_two("a"), over_two("b")))
    assert ray.groups == [[{"CPU": 4}] * 2] * 2
    assert ray.strategies == [strategy] * 2


def placed_over_two() -> tuple[RecordedRay, ActorPlacement, list[RayEvent]]:
    """Return a worker whose two actors run agents."""
    ray = RecordedRay({"CPU": 3.0}, {"CPU": 3.0})
    placed, events = placement(ray)
    placed.take(order(over_two("a")))
    ray.state = "CREATED"
    placed.look()
    answer(ray, placed, "first:7")
    return ray, placed, events


def answer(ray: RecordedRay, placed: ActorPlacement, address: str) -> None:
    """Answer the call for node 0's address, of the last actors that were started."""
    first, second = ray.actors[-2:]
    (asked,) = first.calls
    assert asked.argument is None
    assert not second.calls
    asked.value = address
    placed.look()


def test_actors_of_nodes_are_told_the_address_of_the_first() -> None:
    ray, placed, events = placed_over_two()
    first, second = ray.actors
    assert [each.options["scheduling_strategy"] for each in ray.actors] == [0, 1]
    assert [each.options["num_cpus"] for each in ray.actors] == [3, 3]
    # Ray starts again what has no address for others.
    assert [each.options["max_restarts"] for each in ray.actors] == [0, -1]
    common: dict[str, Any] = {"device": "cpu", "num_threads": 3}
    assert [each.argument for each in first.calls] == [None, over_two("a", **common)]
    behind = setup("a", join="first:7", tls=NODE, num_nodes=2, node=1, **common)
    assert [each.argument for each in second.calls] == [behind]
    placed.look()
    assert len(ray.actors) == 2
    assert not events


@pytest.mark.parametrize("is_lost_again", [False, True])
def test_all_actors_are_replaced_if_the_first_is_lost(is_lost_again: bool) -> None:
    ray, placed, events = placed_over_two()
    ray.actors[0].calls[1].value = ActorLost()
    placed.look()
    old, new = ray.actors[:2], ray.actors[2:]
    assert all(each.is_killed for each in old)
    if is_lost_again:  # before it has told its address
        new[0].calls[0].value = ActorLost()
        placed.look()
        new = ray.actors[4:]
    answer(ray, placed, "second:8")
    assert [each.options["scheduling_strategy"] for each in new] == [0, 1]
    told = new[1].calls[0].argument
    assert told is not None
    assert told.join == "second:8"
    assert not any(each.is_killed for each in new)
    assert not events
    assert len(ray.groups) == 1


@pytest.mark.parametrize("actor", [0, 1])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("the worker on x ended: no model", "the worker on x ended: no model"),
        (ActorLost(actor_init_failed=True), "an actor of Ray ended: it died"),
        (RuntimeError("a bug"), "an actor of Ray ended: a bug"),
    ],
)
def test_all_actors_end_with_one_that_ends_for_good(actor: int, value: Any, reason: str) -> None:
    ray, placed, events = placed_over_two()
    ray.actors[actor].calls[-1].value = value
    placed.look()
    assert events == [ActorEnded(id="a", reason=reason)]
    assert all(each.is_killed for each in ray.actors)
    assert ray.removed == ray.groups


def test_a_worker_of_several_hosts_is_stopped_and_its_place_is_free() -> None:
    ray, placed, events = placed_over_two()
    placed.take(StopActor(id="a"))
    assert all(each.is_killed for each in ray.actors)
    assert ray.removed == ray.groups
    placed.take(order(over_two("b")))
    placed.look()
    answer(ray, placed, "first:8")
    assert len(ray.actors) == 4
    assert not events


def test_what_several_hosts_lack_is_told() -> None:
    ray = RecordedRay({"CPU": 3.0})
    placed, events = placement(ray, is_local=True)
    placed.take(order(over_two("a", num_threads=2)))
    assert events == [
        ActorEnded(
            id="a",
            reason="Ray has no room for 1 worker with 2 CPUs on each of 2 hosts: "
            "3 of 3 CPUs free on 1 node",
        )
    ]


def test_several_hosts_with_gpus_are_refused() -> None:
    ray = RecordedRay({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0})
    placed, events = placement(ray)
    placed.take(order(over_two("a")))
    reason = "--nnodes is for CPUs: leave it out, or use --device cpu"
    assert events == [ActorEnded(id="a", reason=reason)]
    placed.take(order(over_two("b", device="cpu")))
    assert ray.groups == [[{"CPU": 8}] * 2]


def test_a_held_port_is_no_other_program_s_and_processes_listen_there_in_turn() -> None:
    with hold_port("127.0.0.1") as held:
        address = held.getsockname()
        for _ in range(2):
            with (
                socket.create_server(address) as listener,
                socket.create_connection(address) as dialed,
            ):
                accepted, _ = listener.accept()
                accepted.close()  # Its port waits for late packets.
                assert dialed.recv(1) == b""
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
