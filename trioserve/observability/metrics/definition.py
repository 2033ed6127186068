"""The definition of a metric, and the source of its value."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from trioserve.observability.metrics.counters import MetricCounters, Watched
from trioserve.observability.metrics.histogram import Histogram
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.observability.statistics import EngineStatistics

COMMON_LABELS = ("model_name", "engine")
"""Labels of every metric except those of HTTP, which don't belong to an engine."""


@attrs.frozen
class Scrape:
    """The values at one moment that metrics are read from."""

    metrics: MetricCounters
    watched: Watched | None
    _statistics: EngineStatistics | None

    @property
    def engine(self) -> Watched:
        """The watched engine."""
        assert self.watched is not None
        return self.watched

    @property
    def statistics(self) -> EngineStatistics:
        """The statistics of the watched engine."""
        assert self._statistics is not None
        return self._statistics

    @property
    def scheduler(self) -> SchedulerStatistics:
        """The statistics of the engine's scheduler."""
        return self.statistics.scheduler

    @property
    def num_deferred(self) -> int:
        """The number of requests on their way to the scheduler's queue."""
        return self.statistics.num_tokenizing


Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]


@attrs.frozen(kw_only=True)
class Definition:
    """A metric. ``name`` is without the prefix and, for a counter, without ``_total``.

    ``labels`` come after :data:`COMMON_LABELS`, unless ``common`` is false. ``read`` returns a
    value for each combination of label values. A metric with ``watching`` exists only while an
    engine runs.
    """

    name: str
    kind: str
    help: str
    group: str
    labels: tuple[str, ...] = ()
    common: bool = True
    watching: bool = False
    read: Callable[[Scrape], Samples] = attrs.field(repr=False)

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels' names, in the order of their values."""
        return (*COMMON_LABELS, *self.labels) if self.common else self.labels

    @property
    def exposed_name(self) -> str:
        """The name as a query writes it, without the prefix and a histogram's suffixes."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


Define = Callable[[str, str, Callable[[Scrape], Value], str], Definition]
"""Function that defines a metric from its group, its name, a function that reads it, and
its help.
"""


def _single(kind: str, *, watching: bool = False) -> Define:
    """Return a function that defines a metric with a single value."""

    def define(group: str, name: str, read: Callable[[Scrape], Value], help: str) -> Definition:
        return Definition(
            name=name,
            kind=kind,
            help=help,
            group=group,
            watching=watching,
            read=lambda scrape: [((), read(scrape))],
        )

    return define


counter = _single("counter")
gauge = _single("gauge")
histogram = _single("histogram")
engine_counter = _single("counter", watching=True)
"""Counter that is read from the watched engine."""
engine_gauge = _single("gauge", watching=True)
