"""The table of all metrics: name, type, labels, meaning, and source of the value.

``/metrics``, the table in the documentation and the tests use :data:`DEFINITIONS`, so they always
agree. Names, types and labels are vLLM's if vLLM has the metric.
"""

from __future__ import annotations

from trioserve.observability.metrics.definition import Definition
from trioserve.observability.metrics.engine_definitions import (
    CACHE,
    HTTP,
    MEDIA,
    RELIABILITY,
    WORKER,
)
from trioserve.observability.metrics.request_definitions import (
    ADAPTERS,
    LATENCY,
    REQUESTS,
    TOKENS,
)

GROUPS = {
    "requests": "Requests",
    "latency": "Latency",
    "tokens": "Tokens",
    "cache": "KV cache",
    "worker": "Worker",
    "media": "Images and audio",
    "reliability": "Reliability",
    "http": "HTTP",
}
"""Titles of the groups of metrics, in the order of the documentation."""

DEFINITIONS: tuple[Definition, ...] = (
    *(*REQUESTS, *ADAPTERS, *LATENCY, *TOKENS, *CACHE, *WORKER, *MEDIA, *RELIABILITY, *HTTP),
)
