"""An engine's metrics for Prometheus: vLLM's names, types and labels, with a configurable prefix.

``counters`` has the counted values as plain Python objects, and ``recorder`` counts: observing a
token takes well under a microsecond. ``definitions`` is the table of all metrics, and
``definition`` is a row of it. ``exposition`` makes Prometheus' samples of the table at a scrape.
``loop_lag`` is the task that measures the event loop's lag.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE_LATEST

from trioserve.observability.metrics.definition import Definition as Definition
from trioserve.observability.metrics.definitions import DEFINITIONS as DEFINITIONS
from trioserve.observability.metrics.histogram import Histogram as Histogram
from trioserve.observability.metrics.loop_lag import measure_loop_lag as measure_loop_lag
from trioserve.observability.metrics.recorder import Metrics as Metrics
