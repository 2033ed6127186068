"""From the table of definitions to Prometheus' families, when a scrape asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trioserve.observability.metrics.definition import Definition, Scrape, Value
from trioserve.observability.metrics.definitions import DEFINITIONS
from trioserve.observability.metrics.histogram import Histogram

if TYPE_CHECKING:
    from trioserve.observability.metrics.recorder import Metrics

ENGINE = "0"
"""The label that tells several engines of one server apart; there is one."""


@attrs.define(eq=False)
class Exposition(Collector):
    """A collector over one engine's metrics. Those of a running engine need one that is watched."""

    metrics: Metrics

    def collect(self) -> Iterable[Metric]:
        """Every family of the table, in its order."""
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
