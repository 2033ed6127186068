"""Pictures of an engine of this process, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import trio

from trioserve.observability.live.monitor import (
    DEFAULT_NODES,
    DEFAULT_REQUESTS,
    Monitor,
    MonitoredEngine,
    SnapshotSubscription,
)
from trioserve.observability.live.schema import Hello, Snapshot
from trioserve.protocol.version import __version__

DEFAULT_INTERVAL = 0.5
"""Seconds between two pictures."""


@attrs.define(eq=False)
class SnapshotStream:
    """Pictures, an async iterator: the first at once, each later one when its time has come.

    Whoever is slower than that gets fewer, and each is of the moment in which it is asked for.
    """

    _watcher: SnapshotSubscription
    _interval: float
    _due: float = attrs.field(init=False, factory=trio.current_time)

    def __aiter__(self) -> SnapshotStream:
        return self

    async def __anext__(self) -> Snapshot:
        """The next picture. Cancelling it loses nothing.

        Raises:
            EngineError: the engine is closed.
        """
        await trio.sleep_until(self._due)
        self._due = due_after(self._due, self._interval)
        return self._watcher.take()


def due_after(due: float, interval: float) -> float:
    """When the next picture is due after one that was at ``due``, and is taken now."""
    now = trio.current_time()
    return due + interval if due + interval > now else now + interval


@contextlib.asynccontextmanager
async def watch(
    engine: MonitoredEngine,
    *,
    interval: float = DEFAULT_INTERVAL,
    requests: int = DEFAULT_REQUESTS,
    nodes: int = DEFAULT_NODES,
) -> AsyncIterator[SnapshotStream]:
    """Watch ``engine``: ``async with watch(engine) as snapshots``, then ``async for``.

    Args:
        engine: of this process.
        interval: seconds between two pictures.
        requests: most requests in a picture.
        nodes: most nodes of the prefix tree in one.

    Raises:
        WatcherLimit: as many watch it as may.
    """
    with subject_of(engine).watched(requests=requests, nodes=nodes) as watcher:
        await trio.lowlevel.checkpoint()
        yield SnapshotStream(watcher, interval)


def subject_of(engine: MonitoredEngine) -> Monitor:
    """Return the monitor of ``engine``, whose scheduler has to be in this process."""
    return Monitor.of(engine)


def hello_of(
    engine: MonitoredEngine, *, model: str, started: float, front_ends: int, may_control: bool
) -> Hello:
    """What stays as it is while somebody watches ``engine``."""
    ready = engine.ready
    return Hello(
        model=model,
        version=__version__,
        max_model_len=engine.max_model_len,
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        page_size=ready.page_size,
        device=ready.device_name,
        started=started,
        front_ends=front_ends,
        may_control=may_control,
        lora=[adapter.name for adapter in engine.adapters],
    )
