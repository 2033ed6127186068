"""The state of one worker at one moment."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class WorkerReport:
    """The state of one of an engine's workers at one moment."""

    index: int
    """Its number, from 0, which no other worker of the engine ever has."""
    state: str
    """``starting`` (it loads, and gets no requests yet), ``running``, ``stalled`` (a step is so
    late that it may be hung), ``draining`` (it is being removed), ``restarting``, ``released`` or
    ``ended``.
    """
    role: str
    """Part of each request that it computes: ``both``, ``prefill`` or ``decode``."""
    device: str
    """Name of its device; empty while the first process loads."""
    pid: int | None
    """Process id while it runs; None on another host."""
    rank_pids: tuple[int, ...] = ()
    """Process ids of its ranks behind that one, in order; none of another host are known."""
    host: str | None
    """Name of its host; None if that is the engine's."""
    restarts: int
    """Number of its processes that were replaced."""
    last_loss: str | None
    """Reason of the last loss."""
    num_running: int
    """Sequences that are computed."""
    num_waiting: int
    """Sequences that wait for a slot."""
    num_steps: int
    """Steps computed since the start."""
    pages_total: int
    """Pages of its KV cache."""
    pages_free: int
    """Pages that hold nothing."""
    pages_cached: int
    """Pages of the prefix cache that no running sequence holds."""
    decode_ms: float
    """Milliseconds that a step with one more stream takes now, as its steps so far predict."""
    plan_bytes: int
    """Bytes of all plans sent to it."""
    round_trip_ms: float | None
    """Milliseconds from the last heartbeat to its answer; None on the engine's host."""

    @property
    def is_up(self) -> bool:
        """True while its process serves, even if a step is late."""
        return self.state in ("running", "stalled", "draining")

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that requests hold, from 0 to 1."""
        free = self.pages_free + self.pages_cached
        return (self.pages_total - free) / max(self.pages_total, 1)
