"""The resources of a cluster of Ray: what each actor gets of them, and what lacks."""

from __future__ import annotations

from typing import Any

import attrs

from trioserve.workers.ray.messages import PlaceActors


@attrs.define(eq=False)
class ClusterResources:
    """The resources of a cluster, and those of each actor.

    Args:
        ray: The module.
    """

    _ray: Any
    bundle: dict[str, float] = attrs.field(init=False, factory=dict)
    """Resources of each actor, chosen for the first ones."""

    def has_gpus_for(self, order: PlaceActors) -> bool:
        """Return True if workers are to have GPUs."""
        device = order.setups[0].device
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        return device == "cuda" or (device == "auto" and has_gpus)

    def choose_bundle(self, order: PlaceActors) -> None:
        """Choose the resources of each actor: GPUs if workers have GPUs, otherwise CPUs."""
        if self.bundle:
            return
        setup = order.setups[0]
        if self.has_gpus_for(order):
            self.bundle = {"GPU": float(order.num_gpus), "CPU": 1.0}
            return
        cpus = [int(node["Resources"].get("CPU", 0)) for node in self._alive_nodes()]
        share = setup.num_threads or cpu_share(cpus, order.num_sharing, setup.num_nodes)
        self.bundle = {"CPU": float(share)}

    def strategy(self, num_nodes: int) -> str:
        """Return Ray's strategy for the bundles of a worker of ``num_nodes`` nodes.

        They are on different hosts, if as many have room for one.
        """
        if num_nodes == 1:
            return "PACK"
        hosts = [
            node
            for node in self._alive_nodes()
            if all(node["Resources"].get(name, 0) >= each for name, each in self.bundle.items())
        ]
        return "STRICT_SPREAD" if len(hosts) >= num_nodes else "SPREAD"

    def lacks_room(self, num_actors: int) -> bool:
        """Return True if the cluster is too small for so many actors."""
        there = self._ray.cluster_resources()
        return any(there.get(name, 0) < each * num_actors for name, each in self.bundle.items())

    def shortage(self, order: PlaceActors) -> str:
        """Return a line that says what is needed and what is there."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        needed = " and ".join(_counted(each, name) for name, each in self.bundle.items())
        found = " and ".join(
            f"{free.get(name, 0):g} of {_counted(there.get(name, 0), name)}" for name in self.bundle
        )
        num_nodes = order.setups[0].num_nodes
        workers = _counted(len(order.setups), "worker")
        each = f"on each of {num_nodes} hosts" if num_nodes > 1 else "each"
        nodes = _counted(len(self._alive_nodes()), "node")
        return f"Ray has no room for {workers} with {needed} {each}: {found} free on {nodes}"

    def _alive_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]


def cpu_share(cpus: list[int], num_workers: int, num_nodes: int = 1) -> int:
    """Return the most CPUs that each actor of ``num_workers`` workers can have.

    The nodes of a worker are on different hosts, if there are as many. The result is 1 if there
    aren't enough CPUs for all.

    Args:
        cpus: CPUs of each host.
        num_workers: Number of workers.
        num_nodes: Number of nodes, and so of actors, of each worker.
    """
    are_apart = sum(each > 0 for each in cpus) >= num_nodes
    most = num_workers if are_apart else num_workers * num_nodes
    return next(
        (
            size
            for size in range(max(cpus, default=0), 1, -1)
            if sum(min(each // size, most) for each in cpus) >= num_workers * num_nodes
        ),
        1,
    )


def _counted(number: float, name: str) -> str:
    return f"{number:g} {name}{'' if number == 1 else 's'}"
