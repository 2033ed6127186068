"""The placement groups and actors of an engine. All calls of Ray are here and in the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from trioserve.workers.ray.actor import WorkerActor
from trioserve.workers.ray.messages import (
    ActorEnded,
    AgentSetup,
    NoRoomYet,
    PlaceActors,
    RayCommand,
    RayEvent,
    StopActor,
)
from trioserve.workers.ray.resources import ClusterResources

FIRST_WARNING = 5.0
"""Seconds without room for actors before that is told."""
WARNING_INTERVAL = 60.0

Send = Callable[[RayEvent], None]


@attrs.define(eq=False)
class _Group:
    """A placement group with a bundle for each node of each worker."""

    order: PlaceActors
    handle: Any
    has_actors: bool = False
    waits_since: float | None = None
    """Time since which there is no room for all bundles."""
    warned_at: float = 0.0


@attrs.define(eq=False)
class _PlacedWorker:
    """The actors of a worker, one for each of its nodes."""

    group: _Group
    index: int
    """Its place in the group's order."""
    setup: AgentSetup
    actors: list[Any]
    address: Any = None
    """Result of the call for node 0's address; None if there is nothing to wait for."""
    results: list[Any] = attrs.field(factory=list)
    """Results of the calls that run agents."""


@attrs.define(eq=False)
class ActorPlacement:
    """The placement groups and actors of an engine.

    Args:
        ray: The module.
        is_local: True if the cluster was started by this process, so that nothing else uses it.
        send: Sends an event to the engine.
    """

    _ray: Any
    _is_local: bool
    _send: Send
    _resources: ClusterResources = attrs.field(init=False)
    _groups: list[_Group] = attrs.field(init=False, factory=list)
    _workers: dict[str, _PlacedWorker] = attrs.field(init=False, factory=dict)
    """Workers that have actors, by their agents' names."""

    @_resources.default
    def _make_resources(self) -> ClusterResources:
        return ClusterResources(self._ray)

    def take(self, command: RayCommand) -> None:
        """Do what a command says."""
        if isinstance(command, StopActor):
            self._end(command.id)
            return
        num_nodes = command.setups[0].num_nodes
        if num_nodes > 1 and self._resources.has_gpus_for(command):
            self._refuse(command, "--nnodes is for CPUs: leave it out, or use --device cpu")
            return
        self._resources.choose_bundle(command)
        if self._takes_free_place(command):
            return
        if self._is_local and command.timeout is not None and self._lacks_room(command):
            self._refuse(command, self._resources.shortage(command))
            return
        orders = [command]
        if num_nodes > 1:  # Ray spreads the bundles of a group, and those of a worker are meant.
            orders = [msgspec.structs.replace(command, setups=[each]) for each in command.setups]
        for order in orders:
            bundles = [self._resources.bundle] * _num_actors(order)
            strategy = self._resources.strategy(num_nodes)
            handle = self._ray.util.placement_group(bundles, strategy=strategy)
            self._groups.append(_Group(order, handle))

    def look(self) -> None:
        """Start the actors that there is room for, and tell what has ended or waits."""
        for group in list(self._groups):
            self._look_at(group)
        for worker in list(self._workers.values()):
            self._look_at_worker(worker)

    def _lacks_room(self, order: PlaceActors) -> bool:
        """Return True if the places that there are and those of ``order`` are too many."""
        orders = (order, *(group.order for group in self._groups))
        return self._resources.lacks_room(sum(map(_num_actors, orders)))

    # ---- groups

    def _look_at(self, group: _Group) -> None:
        table = self._ray.util.placement_group_table(group.handle)
        now = time.monotonic()
        if table.get("state") == "CREATED":
            group.waits_since = None
            if not group.has_actors:
                group.has_actors = True
                for index in range(len(group.order.setups)):
                    self._start(group, index)
            return
        if group.waits_since is None:
            group.waits_since = now
            group.warned_at = now + FIRST_WARNING - WARNING_INTERVAL
        limit = None if group.has_actors else group.order.timeout
        if limit is not None and now - group.waits_since >= limit:
            self._groups.remove(group)
            self._ray.util.remove_placement_group(group.handle)
            self._refuse(group.order, f"{self._resources.shortage(group.order)}, for {limit:g} s")
        elif now - group.warned_at >= WARNING_INTERVAL:
            group.warned_at = now
            self._send(NoRoomYet(reason=self._resources.shortage(group.order)))

    def _refuse(self, order: PlaceActors, reason: str) -> None:
        for setup in order.setups:
            self._send(ActorEnded(id=setup.id, reason=reason))

    def _takes_free_place(self, order: PlaceActors) -> bool:
        """Start a worker in the place of one that has ended; return False if there is none."""
        for group in self._groups:
            for index, setup in enumerate(group.order.setups):
                if group.has_actors and setup.id not in self._workers and len(order.setups) == 1:
                    group.order.setups[index] = order.setups[0]
                    self._start(group, index)
                    return True
        return False

    # ---- workers

    def _start(self, group: _Group, index: int) -> None:
        """Start the actors of a worker, and run its agent if it is the only one."""
        setup, bundle = group.order.setups[index], self._resources.bundle
        told = msgspec.structs.replace(
            setup,
            device="cuda" if "GPU" in bundle else "cpu",
            num_threads=setup.num_threads if "GPU" in bundle else int(bundle["CPU"]),
        )
        places = range(index * setup.num_nodes, (index + 1) * setup.num_nodes)
        # Other nodes are told node 0's address. So Ray can start their actors again by itself, but
        # not that of node 0, whose next address may be another one.
        actors = [
            self._new_actor(group, place, again=setup.num_nodes == 1 or place > places[0])
            for place in places
        ]
        worker = self._workers[setup.id] = _PlacedWorker(group, index, told, actors)
        if setup.num_nodes == 1:
            worker.results = [_run(actors[0], told)]
        else:
            worker.address = actors[0].hold_address.remote()

    def _new_actor(self, group: _Group, place: int, *, again: bool) -> Any:
        """Return a new actor in a bundle of a group.

        If it is lost, Ray starts it ``again``, and makes its call again.
        """
        strategies = self._ray.util.scheduling_strategies
        actor = self._ray.remote(WorkerActor).options(
            num_cpus=self._resources.bundle["CPU"],
            num_gpus=self._resources.bundle.get("GPU", 0.0),
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                group.handle, placement_group_bundle_index=place
            ),
            max_restarts=-1 if again else 0,
            max_task_retries=-1 if again else 0,
        )
        return actor.remote()

    def _run_nodes(self, worker: _PlacedWorker, address: str) -> None:
        """Run the agents of all nodes, once the ``address`` of node 0 is known."""
        first, tls = worker.setup, worker.group.order.node_tls
        assert tls is not None
        behind = msgspec.structs.replace(first, join=address, tls=tls, nodes_tls=None)
        worker.results = [
            _run(actor, msgspec.structs.replace(behind, node=node) if node else first)
            for node, actor in enumerate(worker.actors)
        ]

    def _look_at_worker(self, worker: _PlacedWorker) -> None:
        """Go on once node 0's address is known, or an actor has ended."""
        try:
            if worker.address is not None and self._is_there(worker.address):
                self._run_nodes(worker, str(self._ray.get(worker.address)))
                worker.address = None
            ended = [each for each in worker.results if self._is_there(each)]
            if not ended:
                return
            reason = str(self._ray.get(ended[0]))
        except Exception as error:  # Of any class: Ray raises what the actor has raised.
            if self._comes_back(worker, error):
                self._kill(worker)
                self._start(worker.group, worker.index)
                return
            reason = f"an actor of Ray ended: {one_line(error)}"
        self._end(worker.setup.id)
        self._send(ActorEnded(id=worker.setup.id, reason=reason))

    def _comes_back(self, worker: _PlacedWorker, error: Exception) -> bool:
        """Return True if node 0 of several was lost, so that all actors are to be replaced."""
        is_loss = isinstance(error, self._ray.exceptions.RayActorError)
        return len(worker.actors) > 1 and is_loss and not getattr(error, "actor_init_failed", False)

    def _is_there(self, result: Any) -> bool:
        return bool(self._ray.wait([result], timeout=0)[0])

    def _kill(self, worker: _PlacedWorker) -> None:
        for actor in worker.actors:
            self._ray.kill(actor)

    def _end(self, name: str) -> None:
        """End a worker's actors, and remove its placement group if it was the last one there."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._kill(worker)
        for group in list(self._groups):
            names = {setup.id for setup in group.order.setups}
            if name in names and not names & self._workers.keys():
                self._groups.remove(group)
                self._ray.util.remove_placement_group(group.handle)


def _run(actor: Any, setup: AgentSetup) -> Any:
    """Have an actor run its agent; return the result of the call.

    The setup is an argument of the call and not of the actor: those are stored in Ray's head.
    """
    return actor.run.remote(msgspec.json.encode(setup))


def _num_actors(order: PlaceActors) -> int:
    return sum(setup.num_nodes for setup in order.setups)


def one_line(error: Exception) -> str:
    """Return the last line of an error, where Ray puts the reason after a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
