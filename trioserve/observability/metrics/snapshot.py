"""The counts of one process as a message, and their sum over several processes.

Every attribute of :class:`~trioserve.observability.metrics.recorder.Metrics` of a type that can be
added up is included, by its name.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import attrs

from trioserve.observability.metrics.histogram import Histogram
from trioserve.observability.metrics.loop_lag import LoopLag
from trioserve.observability.metrics.recorder import Metrics

Key = tuple[str | int, ...]
"""Key of a counter; a single word is a tuple of one."""


@attrs.frozen(kw_only=True)
class MetricsSnapshot:
    """The counts of one process up to now."""

    numbers: dict[str, int] = attrs.field(factory=dict)
    counters: dict[str, list[tuple[Key, int]]] = attrs.field(factory=dict)
    histograms: dict[str, tuple[list[int], float]] = attrs.field(factory=dict)
    """Counts by bound, and the sum."""
    peaks: dict[str, float] = attrs.field(factory=dict)
    """Recent peaks of repeated measurements."""
    num_connections: int = 0

    @property
    def lasting(self) -> MetricsSnapshot:
        """The part that remains valid after the process has gone."""
        return attrs.evolve(self, peaks={}, num_connections=0)


def snapshot_of(metrics: Metrics) -> MetricsSnapshot:
    """Return the counts of ``metrics``."""
    snapshot = MetricsSnapshot(num_connections=len(metrics.connections))
    for name, value in vars(metrics).items():
        match value:
            case collections.Counter():
                snapshot.counters[name] = [
                    (key if isinstance(key, tuple) else (key,), count)
                    for key, count in value.items()
                ]
            case Histogram():
                snapshot.histograms[name] = (list(value.counts), value.total)
            case LoopLag():
                snapshot.histograms[name] = (list(value.histogram.counts), value.histogram.total)
                snapshot.peaks[name] = value.peak
            case int():
                snapshot.numbers[name] = value
    return snapshot


def add_up(snapshots: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    """Return the total of ``snapshots``: sums, and the highest peaks."""
    numbers: collections.Counter[str] = collections.Counter()
    counters: dict[str, collections.Counter[Key]] = {}
    histograms: dict[str, tuple[list[int], float]] = {}
    peaks: dict[str, float] = {}
    num_connections = 0
    for each in snapshots:
        numbers.update(each.numbers)
        num_connections += each.num_connections
        for name, entries in each.counters.items():
            counters.setdefault(name, collections.Counter()).update(dict(entries))
        for name, (counts, total) in each.histograms.items():
            before, sum_before = histograms.get(name, ([0] * len(counts), 0.0))
            summed = [a + b for a, b in zip(before, counts, strict=True)]
            histograms[name] = (summed, sum_before + total)
        for name, peak in each.peaks.items():
            peaks[name] = max(peaks.get(name, 0.0), peak)
    return MetricsSnapshot(
        numbers=dict(numbers),
        counters={name: list(counter.items()) for name, counter in counters.items()},
        histograms=histograms,
        peaks=peaks,
        num_connections=num_connections,
    )


def filled(snapshot: MetricsSnapshot, *, model_name: str, prefix: str) -> Metrics:
    """Return metrics with the counts of ``snapshot``."""
    metrics = Metrics(model_name, prefix)
    metrics.watch_connections(range(snapshot.num_connections))
    for name, number in snapshot.numbers.items():
        setattr(metrics, name, number)
    for name, entries in snapshot.counters.items():
        counter = {key[0] if len(key) == 1 else key: count for key, count in entries}
        getattr(metrics, name).update(counter)
    for name, (counts, total) in snapshot.histograms.items():
        value = getattr(metrics, name)
        if isinstance(value, LoopLag):
            value.remember(snapshot.peaks.get(name, 0.0))
            value = value.histogram
        value.counts, value.total = list(counts), total
    return metrics
