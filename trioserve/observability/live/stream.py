"""Streams of snapshots of an engine in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import trio

from trioserve.observability.live.monitor import (
    DEFAULT_NODES,
    DEFAULT_REQUESTS,
    DescribedEngine,
    Monitor,
    MonitoredEngine,
    SnapshotSubscription,
)
from trioserve.observability.live.schema import Hello, Snapshot
from trioserve.protocol.version import __version__

DEFAULT_INTERVAL = 0.5
"""Seconds between two snapshots."""


@attrs.define(eq=False)
class SnapshotStream:
    """An async iterator of snapshots: the first at once, each later one at its time.

    A slow reader gets fewer snapshots, and each is of the moment in which it is requested.
    """

    _watcher: SnapshotSubscription
    _interval: float
    _due: float = attrs.field(init=False, factory=trio.current_time)

    def __aiter__(self) -> SnapshotStream:
        return self

    async def __anext__(self) -> Snapshot:
        """Return the next snapshot. Cancelling this loses nothing.

        Raises:
            EngineError: the engine is closed.
        """
        await trio.sleep_until(self._due)
        self._due = due_after(self._due, self._interval)
        return self._watcher.take()


def due_after(due: float, interval: float) -> float:
    """Return the time of the next snapshot if the last one was due at ``due`` and is taken now."""
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
        engine: an engine of this process.
        interval: seconds between two snapshots.
        requests: the most requests in a snapshot.
        nodes: the most nodes of the prefix tree in a snapshot.

    Raises:
        WatcherLimit: the limit of subscriptions is reached.
    """
    with monitor_of(engine).watched(requests=requests, nodes=nodes) as watcher:
        await trio.lowlevel.checkpoint()
        yield SnapshotStream(watcher, interval)


def monitor_of(engine: MonitoredEngine) -> Monitor:
    """Return the monitor of ``engine``; its schedulers have to be in this process."""
    return Monitor.of(engine)


def hello_of(
    engine: DescribedEngine, *, model: str, started: float, front_ends: int, may_control: bool
) -> Hello:
    """Return the facts about ``engine`` that don't change during a subscription."""
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
