"""What one metric is, and what it is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs

from trioserve.observability.metrics.histogram import Histogram
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.observability.statistics import EngineStatistics

if TYPE_CHECKING:
    from trioserve.observability.metrics.recorder import Metrics, Watched

COMMON_LABELS = ("model_name", "engine")
"""On every metric but those of HTTP, which isn't the engine's."""


@attrs.frozen
class Scrape:
    """What metrics are read from, at one moment."""

    metrics: Metrics
    watched: Watched | None
    _statistics: EngineStatistics | None

    @property
    def engine(self) -> Watched:
        """The engine that is watched."""
        assert self.watched is not None
        return self.watched

    @property
    def statistics(self) -> EngineStatistics:
        """That engine's."""
        assert self._statistics is not None
        return self._statistics

    @property
    def scheduler(self) -> SchedulerStatistics:
        """The scheduler's part of the statistics."""
        return self.statistics.scheduler

    @property
    def num_deferred(self) -> int:
        """Requests on their way to the scheduler's queue."""
        return self.statistics.num_tokenizing


Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]


@attrs.frozen(kw_only=True)
class Definition:
    """One metric. ``name`` is without the prefix and, for a counter, without ``_total``.

    ``labels`` come after :data:`COMMON_LABELS`, unless ``common`` is false. ``read`` gives a value
    for each combination of their values. One with ``watching`` is there only while an engine runs.
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
"""Of a group, a name, how the value is read, and help."""


def _single(kind: str, *, watching: bool = False) -> Define:
    """How a metric is defined that has one value."""

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
"""One that is read from the watched engine, as the next."""
engine_gauge = _single("gauge", watching=True)
