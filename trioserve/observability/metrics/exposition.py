"""Prometheus' metric families, made from the table of definitions at a scrape."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trioserve.observability.metrics.counters import MetricCounters
from trioserve.observability.metrics.definition import Definition, Scrape, Value
from trioserve.observability.metrics.definitions import DEFINITIONS
from trioserve.observability.metrics.histogram import Histogram

ENGINE = "0"
"""Value of the label for one of several engines of a server; there is one."""


@attrs.define(eq=False)
class Exposition(Collector):
    """Collector of one engine's metrics. The metrics of a running engine need a watched one."""

    metrics: MetricCounters

    def collect(self) -> Iterable[Metric]:
        """Yield every family of the table, in its order."""
        metrics = self.metrics
        scrape = Scrape(metrics, metrics.watched, metrics.statistics())
        for definition in DEFINITIONS:
            if metrics.watched is not None or not definition.watching:
                yield self._family(definition, scrape)

    def _family(self, definition: Definition, scrape: Scrape) -> Metric:
        name, labels = f"{self.metrics.prefix}:{definition.name}", definition.all_labels
        common = (self.metrics.model_name, ENGINE) if definition.common else ()
        samples = [((*common, *values), value) for values, value in definition.read(scrape)]
        if definition.kind == "histogram":
            return _histogram_family(name, definition.help, labels, samples)
        family_class = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
        family = family_class(name, definition.help, labels=labels)
        for values, value in samples:
            assert not isinstance(value, Histogram)
            family.add_metric(values, value)
        return family


def _histogram_family(
    name: str,
    help: str,
    labels: tuple[str, ...],
    samples: list[tuple[tuple[str, ...], Value]],
) -> Metric:
    family = HistogramMetricFamily(name, help, labels=labels)
    for values, value in samples:
        assert isinstance(value, Histogram)
        family.add_metric(values, buckets=value.cumulative(), sum_value=value.total)
    return family
