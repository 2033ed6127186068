"""What an engine tells Prometheus: vLLM's metric names with ``trioserve:`` in front.

The counters live in plain Python objects, so that observing a token costs well under a microsecond,
and become Prometheus' samples only when somebody scrapes. Gauges are read from the engine at that
moment. Each engine has a registry of its own, so two engines in one program don't meet.
"""

from __future__ import annotations

import bisect
import collections
import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import attrs
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trioserve.request import Finish, Request, Sequence
from trioserve.statistics import EngineStatistics

__all__ = ["CONTENT_TYPE_LATEST", "Histogram", "Metrics"]

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
_REQUEST_TOKENS = tuple(float(unit * 10**power) for power in range(7) for unit in (1, 2, 5))


@attrs.define(eq=False)
class Histogram:
    """Counts of observations by upper bound; the last count is of those past every bound."""

    bounds: tuple[float, ...]
    counts: list[int] = attrs.field(init=False)
    total: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times over."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) pairs, the last one of everything."""
        pairs: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            pairs.append(("+Inf" if bound == math.inf else repr(bound), float(seen)))
        return pairs


class _Watched(Protocol):
    """What a scrape needs of an engine."""

    def statistics(self) -> EngineStatistics: ...


class Metrics:
    """The counters of one engine, and the registry that exposes them.

    The hooks (``observe_*``, ``request_finished``) neither block nor fail; times are seconds.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: collections.Counter[str] = collections.Counter()
        self.http_responses: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self.time_to_first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(_INTER_TOKEN_SECONDS)
        self.iteration_tokens = Histogram(_STEP_TOKENS)
        self.e2e_latency = Histogram(_REQUEST_SECONDS)
        self.queue_time = Histogram(_REQUEST_SECONDS)
        self.prefill_time = Histogram(_REQUEST_SECONDS)
        self.decode_time = Histogram(_REQUEST_SECONDS)
        self.inference_time = Histogram(_REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(_REQUEST_TOKENS)
        self.request_generation_tokens = Histogram(_REQUEST_TOKENS)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Samples(self))
        self._engine: _Watched | None = None

    def watch(self, engine: _Watched) -> None:
        """Read the gauges from ``engine`` at every scrape."""
        self._engine = engine

    def observe_step(self, num_tokens: int) -> None:
        """A step computed ``num_tokens`` tokens, of prompts and of outputs together."""
        self.iteration_tokens.observe(num_tokens)

    def observe_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """``sequence`` got ``num_tokens`` tokens at ``now``; its times are as they were before."""
        times = sequence.request.times
        if times.first_token is None:
            self.time_to_first_token.observe(now - times.arrived)
        last = sequence.last_token
        if last is not None:
            self.inter_token_latency.observe((now - last) / num_tokens, num_tokens)
        self.generation_tokens += num_tokens

    def request_finished(self, request: Request, sequence: Sequence, finish: Finish) -> None:
        """Nothing more will be delivered of ``sequence``; ``request.times`` is complete."""
        times = request.times
        self.finished[finish.reason.value] += 1
        self.prompt_tokens += len(request.prompt_ids)
        self.request_prompt_tokens.observe(len(request.prompt_ids))
        self.request_generation_tokens.observe(len(sequence.output_ids))
        _observe_span(self.e2e_latency, times.arrived, times.finished)
        _observe_span(self.queue_time, times.queued, times.first_scheduled)
        _observe_span(self.prefill_time, times.first_scheduled, times.first_token)
        _observe_span(self.decode_time, times.first_token, times.last_token)
        _observe_span(self.inference_time, times.first_scheduled, times.last_token)

    def observe_response(self, method: str, route: str, status: int) -> None:
        """An HTTP request ended; ``route`` is a known path or one word for all others."""
        self.http_responses[method, route, status] += 1

    def statistics(self) -> EngineStatistics | None:
        """The watched engine's counts of this moment; None while nothing is watched."""
        return None if self._engine is None else self._engine.statistics()

    def render(self) -> bytes:
        """Everything in Prometheus' text format, of the type ``CONTENT_TYPE_LATEST``."""
        return generate_latest(self.registry)


def _observe_span(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(end - start)


@attrs.define(eq=False)
class _Samples(Collector):
    """Turns a :class:`Metrics` into Prometheus' families when a scrape asks."""

    metrics: Metrics

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._histograms()
        statistics = self.metrics.statistics()
        if statistics is not None:
            yield from self._engine_families(statistics)

    def _counters(self) -> Iterator[Metric]:
        metrics = self.metrics
        yield self._counter(
            "prompt_tokens", "Prompt tokens of ended requests", metrics.prompt_tokens
        )
        yield self._counter("generation_tokens", "Tokens generated", metrics.generation_tokens)
        finished = CounterMetricFamily(
            "trioserve:request_success",
            "Requests that ended, by why",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in sorted(metrics.finished.items()):
            finished.add_metric([metrics.model_name, reason], count)
        yield finished
        responses = CounterMetricFamily(
            "trioserve:http_requests",
            "HTTP requests that ended, by status (499: the client left)",
            labels=["method", "route", "status"],
        )
        for (method, route, status), count in sorted(metrics.http_responses.items()):
            responses.add_metric([method, route, str(status)], count)
        yield responses

    def _histograms(self) -> Iterator[Metric]:
        metrics = self.metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", metrics.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens", metrics.inter_token_latency),
            ("iteration_tokens_total", "Tokens computed in a step", metrics.iteration_tokens),
            ("e2e_request_latency_seconds", "Arrival to end", metrics.e2e_latency),
            ("request_queue_time_seconds", "Time in the queue", metrics.queue_time),
            ("request_prefill_time_seconds", "First step to first token", metrics.prefill_time),
            ("request_decode_time_seconds", "First to last token", metrics.decode_time),
            ("request_inference_time_seconds", "First step to last token", metrics.inference_time),
            ("request_prompt_tokens", "Prompt tokens of a request", metrics.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Generated tokens of a request",
                metrics.request_generation_tokens,
            ),
        ):
            family = HistogramMetricFamily(f"trioserve:{name}", text, labels=["model_name"])
            family.add_metric(
                [metrics.model_name], buckets=histogram.cumulative(), sum_value=histogram.total
            )
            yield family

    def _engine_families(self, statistics: EngineStatistics) -> Iterator[Metric]:
        scheduler = statistics.scheduler
        waiting = scheduler.num_waiting + statistics.num_tokenizing
        used = scheduler.pages_held / max(scheduler.pages_total, 1)
        yield self._gauge("num_requests_running", "Requests being computed", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Requests not being computed yet", waiting)
        yield self._gauge("kv_cache_usage_perc", "Pages in use, 1 is all", used)
        yield self._gauge(
            "stream_bytes", "Output that waits for slow readers", statistics.stream_bytes
        )
        for name, text, count in (
            ("num_preemptions", "Requests preempted", scheduler.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up", scheduler.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found cached", scheduler.prefix_cache_hits),
            ("worker_steps", "Steps computed", scheduler.num_steps),
            ("worker_step_seconds", "Time in steps", scheduler.step_us / 1e6),
            ("worker_idle_seconds", "Time between steps", scheduler.idle_us / 1e6),
            (
                "worker_restarts",
                "Workers started in place of a dead one",
                statistics.worker_restarts,
            ),
        ):
            yield self._counter(name, text, count)

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"trioserve:{name}", text, labels=["model_name"])
        family.add_metric([self.metrics.model_name], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"trioserve:{name}", text, labels=["model_name"])
        family.add_metric([self.metrics.model_name], value)
        return family
