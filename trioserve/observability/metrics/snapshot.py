"""What one process has counted, as a message, and the sum over several processes.

Whatever is an attribute of :class:`~trioserve.observability.metrics.recorder.Metrics` and of a type
that can be added up is part of it, by its name.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import attrs

from trioserve.observability.metrics.histogram import Histogram
from trioserve.observability.metrics.loop_lag import LoopLag
from trioserve.observability.metrics.recorder import Metrics

Key = tuple[str | int, ...]
"""What a counter counts by; a word by itself stands alone in it."""


@attrs.frozen(kw_only=True)
class MetricsSnapshot:
    """Everything that one process has counted up to now."""

    numbers: dict[str, int] = attrs.field(factory=dict)
    counters: dict[str, list[tuple[Key, int]]] = attrs.field(factory=dict)
    histograms: dict[str, tuple[list[int], float]] = attrs.field(factory=dict)
    """Counts by bound, and the sum."""
    peaks: dict[str, float] = attrs.field(factory=dict)
    """Of what is measured again and again, the worst of late."""
    num_connections: int = 0

    @property
    def lasting(self) -> MetricsSnapshot:
        """What of it remains true when the process is gone."""
        return attrs.evolve(self, peaks={}, num_connections=0)


def snapshot_of(metrics: Metrics) -> MetricsSnapshot:
    """What ``metrics`` has counted."""
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
    """All of them together: sums, and of peaks the highest."""
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
    """Metrics that have counted just what ``snapshot`` says."""
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
