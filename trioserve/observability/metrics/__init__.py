"""What an engine tells Prometheus: vLLM's names, types and labels, under a prefix of one's choice.

``histogram`` and ``recorder`` count, in plain Python objects, so that observing a token costs well
under a microsecond. ``definitions`` is the one table of all metrics, each with how it is read, in
the terms of ``definition``; ``exposition`` turns it into Prometheus' samples when somebody scrapes.
``loop_lag`` is the task that measures how late the event loop is.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE_LATEST

from trioserve.observability.metrics.definition import Definition as Definition
from trioserve.observability.metrics.definitions import DEFINITIONS as DEFINITIONS
from trioserve.observability.metrics.histogram import Histogram as Histogram
from trioserve.observability.metrics.loop_lag import measure_loop_lag as measure_loop_lag
from trioserve.observability.metrics.recorder import Metrics as Metrics
