"""The lines of JSON between the engine and its process for Ray, and what an actor is told."""

from __future__ import annotations

import msgspec


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """All that an actor is told, encoded as JSON."""

    id: str
    """Name of the agent, which its successors in the same place have, too."""
    engine: str
    """Address of the engine's port."""
    authority: str
    """Certificate of the authority, in PEM."""
    certificate: str
    key: str
    """Key of ``certificate``. It is never logged."""
    model: str
    """The engine's MODEL, which the actor looks up on its own host."""
    revision: str | None
    device: str
    num_threads: int | None


class PlaceActors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to process: start an actor for each setup, all or none.

    ``device`` and ``num_threads`` are the engine's options; the process sets those of the setups.
    """

    setups: list[AgentSetup]
    num_sharing: int
    """Number of workers that share the CPUs of the cluster."""
    timeout: float | None
    """Seconds for Ray to have room for them; None for no limit."""
    num_gpus: int = 1
    """GPUs of each worker, if workers have GPUs."""


class StopActor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to process: end an actor."""

    id: str


class RayConnected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: Ray can be used; ``host`` is this host's address for its nodes."""

    host: str


class NoRoomYet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: actors wait for room on a node."""

    reason: str


class ActorEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Process to engine: an actor has ended for good, or there was no room for it."""

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
