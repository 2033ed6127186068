"""What an engine tells Prometheus: vLLM's names, types and labels, under a prefix of one's choice.

``histogram`` and ``recorder`` count, in plain Python objects, so that observing a token costs well
under a microsecond. ``definitions`` is the one table of all metrics, each with how it is read, in
the terms of ``definition``; ``exposition`` turns it into Prometheus' samples when somebody scrapes.
``loop_lag`` is the task that measures how late the event loop is.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from trioserve.observability.metrics.definition import Definition
from trioserve.observability.metrics.definitions import DEFINITIONS
from trioserve.observability.metrics.histogram import Histogram
from trioserve.observability.metrics.loop_lag import measure_loop_lag
from trioserve.observability.metrics.recorder import Metrics

__all__ = [
    "CONTENT_TYPE_LATEST",
    "DEFINITIONS",
    "Definition",
    "Histogram",
    "Metrics",
    "measure_loop_lag",
]
