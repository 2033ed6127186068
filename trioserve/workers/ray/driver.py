"""The process that speaks with Ray: ``python -m trioserve.workers.ray.driver``.

Ray's calls block, and it takes signal handlers, threads and standard output of its process. So the
engine has one for it, with commands on standard input and events on standard output
(:mod:`trioserve.workers.ray.messages`). The process ends when its standard input does. Actors and
placement groups belong to its job, so Ray removes them then, and also when it is killed.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from trioserve.workers.ray.actor import WorkerActor
from trioserve.workers.ray.messages import (
    ActorEnded,
    NoRoomYet,
    PlaceActors,
    RayCommand,
    RayConnected,
    RayEvent,
    RayFailed,
    StopActor,
    to_line,
)

INTERVAL = 0.5
"""Seconds between two looks at actors and placement groups."""
FIRST_WARNING = 5.0
"""Seconds without room for actors before that is told."""
WARNING_INTERVAL = 60.0

Send = Callable[[RayEvent], None]


@attrs.define(eq=False)
class _Group:
    """A placement group with a bundle for each actor."""

    order: PlaceActors
    handle: Any
    has_actors: bool = False
    waits_since: float | None = None
    """Time since which there is no room for all bundles."""
    warned_at: float = 0.0


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
    _bundle: dict[str, float] = attrs.field(init=False, factory=dict)
    """Resources of each actor, chosen for the first ones."""
    _groups: list[_Group] = attrs.field(init=False, factory=list)
    _actors: dict[str, tuple[Any, Any]] = attrs.field(init=False, factory=dict)
    """Each actor and the result of its only call, by the agent's name."""

    def take(self, command: RayCommand) -> None:
        """Do what a command says."""
        if isinstance(command, StopActor):
            self._kill(command.id)
            return
        self._bundle = self._bundle or self._bundle_for(command)
        if self._takes_free_place(command):
            return
        if self._is_local and command.timeout is not None and self._lacks_room(command):
            self._refuse(command, self._shortage(command))
            return
        handle = self._ray.util.placement_group([self._bundle] * len(command.setups))
        self._groups.append(_Group(command, handle))

    def look(self) -> None:
        """Start the actors that there is room for, and tell what has ended or waits."""
        for group in list(self._groups):
            self._look_at(group)
        for name, (_, result) in list(self._actors.items()):
            if self._ray.wait([result], timeout=0)[0]:
                reason = self._reason_of(result)
                self._kill(name)
                self._send(ActorEnded(id=name, reason=reason))

    # ---- resources

    def _bundle_for(self, order: PlaceActors) -> dict[str, float]:
        """Return the resources of an actor: GPUs if workers have GPUs, otherwise CPUs."""
        setup = order.setups[0]
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        if setup.device == "cuda" or (setup.device == "auto" and has_gpus):
            return {"GPU": float(order.num_gpus), "CPU": 1.0}
        cpus = [int(node["Resources"].get("CPU", 0)) for node in self._alive_nodes()]
        return {"CPU": float(setup.num_threads or cpu_share(cpus, order.num_sharing))}

    def _alive_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _lacks_room(self, order: PlaceActors) -> bool:
        """Return True if the places that there are and those of ``order`` are too many."""
        there = self._ray.cluster_resources()
        count = sum(len(each.setups) for each in (order, *(group.order for group in self._groups)))
        return any(there.get(name, 0) < each * count for name, each in self._bundle.items())

    def _shortage(self, order: PlaceActors) -> str:
        """Return a line that says what is needed and what is there."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        count, num_nodes = len(order.setups), len(self._alive_nodes())
        needed = " and ".join(_counted(each, name) for name, each in self._bundle.items())
        found = " and ".join(
            f"{free.get(name, 0):g} of {_counted(there.get(name, 0), name)}"
            for name in self._bundle
        )
        workers, nodes = _counted(count, "worker"), _counted(num_nodes, "node")
        return f"Ray has no room for {workers} with {needed} each: {found} free on {nodes}"

    # ---- groups and actors

    def _look_at(self, group: _Group) -> None:
        table = self._ray.util.placement_group_table(group.handle)
        now = time.monotonic()
        if table.get("state") == "CREATED":
            group.waits_since = None
            if not group.has_actors:
                group.has_actors = True
                for index in range(len(group.order.setups)):
                    self._start_actor(group, index)
            return
        if group.waits_since is None:
            group.waits_since = now
            group.warned_at = now + FIRST_WARNING - WARNING_INTERVAL
        limit = None if group.has_actors else group.order.timeout
        if limit is not None and now - group.waits_since >= limit:
            self._groups.remove(group)
            self._ray.util.remove_placement_group(group.handle)
            self._refuse(group.order, f"{self._shortage(group.order)}, for {limit:g} s")
        elif now - group.warned_at >= WARNING_INTERVAL:
            group.warned_at = now
            self._send(NoRoomYet(reason=self._shortage(group.order)))

    def _refuse(self, order: PlaceActors, reason: str) -> None:
        for setup in order.setups:
            self._send(ActorEnded(id=setup.id, reason=reason))

    def _takes_free_place(self, order: PlaceActors) -> bool:
        """Start an actor in the place of one that has ended; return False if there is none."""
        for group in self._groups:
            for index, setup in enumerate(group.order.setups):
                if group.has_actors and setup.id not in self._actors and len(order.setups) == 1:
                    group.order.setups[index] = order.setups[0]
                    self._start_actor(group, index)
                    return True
        return False

    def _start_actor(self, group: _Group, index: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        setup = group.order.setups[index]
        num_gpus, num_cpus = self._bundle.get("GPU", 0.0), self._bundle["CPU"]
        strategy = PlacementGroupSchedulingStrategy(
            group.handle, placement_group_bundle_index=index
        )
        actor = self._ray.remote(WorkerActor).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            scheduling_strategy=strategy,
            # A lost actor is started again, and its call is made again.
            max_restarts=-1,
            max_task_retries=-1,
        )
        told = msgspec.structs.replace(
            setup,
            device="cuda" if num_gpus else "cpu",
            num_threads=setup.num_threads if num_gpus else int(num_cpus),
        )
        # An argument of the call and not of the actor: those are stored in Ray's head.
        handle = actor.remote()
        self._actors[setup.id] = handle, handle.run.remote(msgspec.json.encode(told))

    def _kill(self, name: str) -> None:
        """End an actor, and remove its placement group if it was the last one there."""
        actor, _ = self._actors.pop(name, (None, None))
        if actor is not None:
            self._ray.kill(actor)
        for group in list(self._groups):
            names = {setup.id for setup in group.order.setups}
            if name in names and not names & self._actors.keys():
                self._groups.remove(group)
                self._ray.util.remove_placement_group(group.handle)

    def _reason_of(self, result: Any) -> str:
        try:
            return str(self._ray.get(result))
        except Exception as error:  # Of any class: Ray raises what the actor has raised.
            return f"an actor of Ray ended: {one_line(error)}"


def cpu_share(cpus: list[int], count: int) -> int:
    """Return the most CPUs that each of ``count`` workers can have on nodes with ``cpus``; 1 if
    there aren't enough for all.
    """
    sizes = range(max(cpus, default=0), 1, -1)
    return next((size for size in sizes if sum(each // size for each in cpus) >= count), 1)


def one_line(error: Exception) -> str:
    """Return the last line of an error, where Ray puts the reason after a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _counted(number: float, name: str) -> str:
    return f"{number:g} {name}{'' if number == 1 else 's'}"


def main() -> None:
    """Connect, and do what the engine says until its end of standard input closes."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Ray prints.
    commands: queue.SimpleQueue[RayCommand] = queue.SimpleQueue()

    def send(event: RayEvent) -> None:
        events.write(to_line(event))

    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    # The engine may be gone.
    with contextlib.suppress(BrokenPipeError):
        try:
            _serve(commands, send)
        except ImportError as error:
            send(RayFailed(reason=f"{error}: install trioserve[ray]"))
        except Exception as error:  # Ray has no base class for what its calls raise.
            send(RayFailed(reason=one_line(error)))


def _serve(commands: queue.SimpleQueue[RayCommand], send: Send) -> None:
    import ray as typed

    ray: Any = typed  # Parts of it have no types.
    try:
        ray.init(
            include_dashboard=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        # Ray tells nowhere else if it has joined a cluster or started one.
        is_local = ray._private.worker.global_worker.node.is_head()
        placement = ActorPlacement(ray, is_local, send)
        send(RayConnected(host="127.0.0.1" if is_local else ray.util.get_node_ip_address()))
        while True:
            with contextlib.suppress(queue.Empty):
                placement.take(commands.get(timeout=INTERVAL))
            placement.look()
    finally:
        ray.shutdown()


def _leave(*_: object) -> None:
    sys.exit(0)


def _read(commands: queue.SimpleQueue[RayCommand]) -> None:
    """Take the engine's commands. At their end, interrupt whatever call of Ray is under way."""
    decoder = msgspec.json.Decoder(RayCommand)
    for line in sys.stdin.buffer:
        commands.put(decoder.decode(line))
    _thread.interrupt_main(signal.SIGTERM)


if __name__ == "__main__":
    main()
