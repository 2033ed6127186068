"""Live snapshots of an engine; without a subscription they cost nothing.

::

    async with trioserve.live.watch(engine) as snapshots:
        async for snapshot in snapshots:
            print(snapshot.counts.running, snapshot.rates.generated_tokens_per_s)

A :class:`Snapshot` is made on demand from the engine's own state. While a subscription is open, the
newest steps and finished requests are recorded for it, too.

Imported by ``http.api``, ``front_ends`` and ``cli``.
"""

from __future__ import annotations

from trioserve.observability.live.monitor import DEFAULT_NODES as DEFAULT_NODES
from trioserve.observability.live.monitor import DEFAULT_REQUESTS as DEFAULT_REQUESTS
from trioserve.observability.live.monitor import MAX_NODES as MAX_NODES
from trioserve.observability.live.monitor import MAX_REQUESTS as MAX_REQUESTS
from trioserve.observability.live.monitor import MAX_WATCHERS as MAX_WATCHERS
from trioserve.observability.live.monitor import Monitor as Monitor
from trioserve.observability.live.monitor import SnapshotSubscription as SnapshotSubscription
from trioserve.observability.live.schema import SCHEMA as SCHEMA
from trioserve.observability.live.schema import Hello as Hello
from trioserve.observability.live.schema import Snapshot as Snapshot
from trioserve.observability.live.stream import DEFAULT_INTERVAL as DEFAULT_INTERVAL
from trioserve.observability.live.stream import SnapshotStream as SnapshotStream
from trioserve.observability.live.stream import due_after as due_after
from trioserve.observability.live.stream import hello_of as hello_of
from trioserve.observability.live.stream import monitor_of as monitor_of
from trioserve.observability.live.stream import watch as watch
