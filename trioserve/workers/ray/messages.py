"""The lines of JSON between the engine and its process for Ray, and what an actor is told."""

from __future__ import annotations

import msgspec

from trioserve.protocol.certificates import Credentials


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """All that an actor is told, encoded as JSON."""

    id: str
    """Name of the agent, which its successors in the same place have, too."""
    join: str
    """Address that it joins: that of the engine's port, or, behind node 0, that of node 0."""
    tls: Credentials
    """Certificates with which it joins."""
    model: str
    """The engine's MODEL, which the actor looks up on its own host."""
    revision: str | None
    device: str
    num_threads: int | None
    num_nodes: int = 1
    """Number of hosts that have the worker's ranks."""
    node: int = 0
    """Number of this host among them."""
    nodes_tls: Credentials | None = None
    """Certificates with which node 0 listens for the others, if there are any."""


class PlaceActors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to process: start a worker for each setup.

    A worker is one actor, or one on each of its nodes; the setup is that of node 0. Workers of one
    node start all or none. ``device`` and ``num_threads`` are the engine's options; the process
    sets those of the setups.
    """

    setups: list[AgentSetup]
    node_tls: Credentials | None = None
    """Certificates with which nodes join node 0, if there are any."""
    num_sharing: int
    """Number of workers that share the CPUs of the cluster."""
    timeout: float | None
    """Seconds for Ray to have room for them; None for no limit."""
    num_gpus: int = 1
    """GPUs of each worker, if workers have GPUs."""


class StopActor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to process: end the actors of a worker."""

    id: str


class RayConnected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: Ray can be used; ``host`` is this host's address for its nodes."""

    host: str


class NoRoomYet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: actors wait for room on a node."""

    reason: str


class ActorEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: an actor has ended for good, or there was no room for it.

    The others of its worker have ended, too.
    """

    id: str
    reason: str


class RayFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: Ray can't be used. The process ends."""

    reason: str


RayCommand = PlaceActors | StopActor
RayEvent = RayConnected | NoRoomYet | ActorEnded | RayFailed


def to_line(message: RayCommand | RayEvent) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"
