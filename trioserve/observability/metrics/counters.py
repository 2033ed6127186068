"""The counters of an engine's metrics, which the recorder updates and a scrape reads."""

from __future__ import annotations

import collections
from collections.abc import Sized
from typing import Protocol

from trioserve.config import EngineConfig
from trioserve.observability.metrics.histogram import (
    FIRST_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS,
    NUM_OUTPUTS,
    REQUEST_SECONDS,
    REQUEST_TOKENS,
    SHORT_SECONDS,
    STEP_TOKENS,
    TOKENS_PER_SECOND,
    Histogram,
)
from trioserve.observability.metrics.loop_lag import LoopLag
from trioserve.observability.statistics import EngineStatistics
from trioserve.protocol import wire

DEFAULT_PREFIX = "trioserve"
REFUSALS = ("deadline_exceeded", "draining", "key_limit", "queue_full", "shutting_down")
"""Codes that are exported from the start, so that alerts see the first one."""


class Watched(Protocol):
    """The parts of an engine that a scrape reads."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def ready(self) -> wire.Ready: ...

    def statistics(self) -> EngineStatistics: ...


class MetricCounters:
    """The counters of one engine's metrics, and the engine that its gauges are read from."""

    def __init__(self, model_name: str, prefix: str = DEFAULT_PREFIX) -> None:
        self.model_name = model_name
        self.prefix = prefix
        self.prompt_tokens: int = 0
        self.cached_prompt_tokens: int = 0
        self.generation_tokens: int = 0
        self.finished: collections.Counter[str] = collections.Counter()
        self.aborts: collections.Counter[str] = collections.Counter()
        self.num_rejected: int = 0
        self.integrity_violations: int = 0
        self.grammars: collections.Counter[tuple[str, str]] = collections.Counter()
        self.worker_losses: collections.Counter[str] = collections.Counter()
        self.replacement_seconds: Histogram = Histogram(REQUEST_SECONDS)
        self.interruption_seconds: Histogram = Histogram(REQUEST_SECONDS)
        self.http_errors: collections.Counter[str] = collections.Counter(dict.fromkeys(REFUSALS, 0))
        self.connections: Sized = ()
        """The HTTP server's open connections."""
        self.http_responses: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self.time_to_first_token: Histogram = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_latency: Histogram = Histogram(INTER_TOKEN_SECONDS)
        self.time_per_output_token: Histogram = Histogram(INTER_TOKEN_SECONDS)
        self.tokens_per_second: Histogram = Histogram(TOKENS_PER_SECOND)
        self.iteration_tokens: Histogram = Histogram(STEP_TOKENS)
        self.e2e_latency: Histogram = Histogram(REQUEST_SECONDS)
        self.queue_time: Histogram = Histogram(REQUEST_SECONDS)
        self.prefill_time: Histogram = Histogram(REQUEST_SECONDS)
        self.decode_time: Histogram = Histogram(REQUEST_SECONDS)
        self.inference_time: Histogram = Histogram(REQUEST_SECONDS)
        self.request_prompt_tokens: Histogram = Histogram(REQUEST_TOKENS)
        self.request_prefill_tokens: Histogram = Histogram(REQUEST_TOKENS)
        self.request_generation_tokens: Histogram = Histogram(REQUEST_TOKENS)
        self.request_most_generation_tokens: Histogram = Histogram(REQUEST_TOKENS)
        self.request_max_tokens: Histogram = Histogram(REQUEST_TOKENS)
        self.request_n: Histogram = Histogram(NUM_OUTPUTS)
        self.grammar_seconds: Histogram = Histogram(SHORT_SECONDS)
        self.media_bytes: collections.Counter[str] = collections.Counter()
        self.media_lookups: int = 0
        self.media_hits: int = 0
        self.media_encode_seconds: Histogram = Histogram(SHORT_SECONDS)
        self.loop_lag: LoopLag = LoopLag()
        self.watched: Watched | None = None
        """The engine that gauges are read from, once there is one."""

    def statistics(self) -> EngineStatistics | None:
        """Return the watched engine's statistics; None while no engine is watched."""
        return None if self.watched is None else self.watched.statistics()
