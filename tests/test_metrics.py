"""What is counted, and what a scrape says of it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trioserve.metrics import Histogram, Metrics
from trioserve.request import Finish, FinishReason, Request, Sequence, Times, TokensPrompt
from trioserve.sampling import SamplerParams, SamplingParams
from trioserve.scheduler import SchedulerStatistics
from trioserve.statistics import EngineStatistics
from trioserve.stream import Stream, StreamBudget


def finished_request(times: Times, num_prompt: int, num_output: int) -> tuple[Request, Sequence]:
    request = Request(
        id="r",
        prompt=TokensPrompt((1,)),
        params=SamplingParams(),
        stream=Stream(StreamBudget(1024, 1024)),
        times=times,
        prompt_ids=[1] * num_prompt,
    )
    sequence = Sequence(request=request, sampler=SamplerParams(), output_ids=[2] * num_output)
    return request, sequence


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a scrape by name and labels, as Prometheus' own parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    labels = {"model_name": "m", **labels}
    return samples(metrics)[f"trioserve:{name}", tuple(sorted(labels.items()))]


class TestHistogram:
    def test_bounds_are_inclusive_from_above(self) -> None:
        histogram = Histogram((1.0, 2.0, 5.0))
        for observed in (0.5, 1.0, 1.5, 5.0, 6.0):
            histogram.observe(observed)
        assert histogram.counts == [2, 1, 1, 1]
        assert histogram.total == 14.0
        assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("5.0", 4.0), ("+Inf", 5.0)]

    def test_many_at_once(self) -> None:
        one, many = Histogram((1.0,)), Histogram((1.0,))
        for _ in range(3):
            one.observe(0.5)
        many.observe(0.5, 3)
        assert (one.counts, one.total) == (many.counts, many.total)


def test_a_finished_request() -> None:
    metrics = Metrics("m")
    times = Times(
        arrived=10.0,
        queued=10.5,
        first_scheduled=12.5,
        first_token=13.5,
        last_token=17.5,
        finished=18.0,
    )
    request, sequence = finished_request(times, 30, 4)
    metrics.request_finished(request, sequence, Finish(FinishReason.LENGTH))
    for name, seconds in (
        ("e2e_request_latency_seconds", 8.0),
        ("request_queue_time_seconds", 2.0),
        ("request_prefill_time_seconds", 1.0),
        ("request_decode_time_seconds", 4.0),
        ("request_inference_time_seconds", 5.0),
        ("request_prompt_tokens", 30.0),
        ("request_generation_tokens", 4.0),
    ):
        assert value(metrics, f"{name}_sum") == seconds
        assert value(metrics, f"{name}_count") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "prompt_tokens_total") == 30


def test_a_request_that_ended_early_counts_what_it_had() -> None:
    metrics = Metrics("m")
    request, sequence = finished_request(Times(arrived=1.0, finished=3.0), 0, 0)
    metrics.request_finished(request, sequence, Finish(FinishReason.ABORT))
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "request_success_total", finished_reason="abort") == 1


def test_tokens_and_steps() -> None:
    metrics = Metrics("m")
    request, sequence = finished_request(Times(arrived=1.0), 3, 0)
    metrics.observe_tokens(sequence, 1, 1.5)
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    request.times.first_token = sequence.last_token = 1.5
    metrics.observe_tokens(sequence, 2, 1.9)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "generation_tokens_total") == 3
    metrics.observe_step(17)
    assert value(metrics, "iteration_tokens_total_sum") == 17


def test_http_responses() -> None:
    metrics = Metrics("m")
    for status in (200, 200, 499):
        metrics.observe_response("POST", "/v1/completions", status)
    labels = (("method", "POST"), ("route", "/v1/completions"))
    found = samples(metrics)
    assert found["trioserve:http_requests_total", (*labels, ("status", "200"))] == 2
    assert found["trioserve:http_requests_total", (*labels, ("status", "499"))] == 1


class Watched:
    def statistics(self) -> EngineStatistics:
        scheduler = SchedulerStatistics(
            num_running=2,
            num_waiting=3,
            pages_total=8,
            pages_held=2,
            num_preemptions=4,
            prefix_cache_queries=100,
            prefix_cache_hits=60,
            num_steps=7,
            step_us=2_500_000,
            idle_us=250_000,
        )
        return EngineStatistics(
            scheduler=scheduler,
            num_tokenizing=1,
            num_streams=6,
            stream_bytes=77,
            worker_restarts=5,
        )


def test_gauges_are_read_when_somebody_asks() -> None:
    metrics = Metrics("m")
    assert not any("num_requests_running" in name for name, _ in samples(metrics))
    metrics.watch(Watched())
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.25,
        "stream_bytes": 77,
        "num_preemptions_total": 4,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
        "worker_steps_total": 7,
        "worker_step_seconds_total": 2.5,
        "worker_idle_seconds_total": 0.25,
        "worker_restarts_total": 5,
    }
    assert {name: value(metrics, name) for name in expected} == expected


def test_engines_do_not_share_a_registry() -> None:
    one, other = Metrics("m"), Metrics("m")
    one.observe_tokens(finished_request(Times(arrived=0.0), 3, 0)[1], 5, 1.0)
    assert value(one, "generation_tokens_total") == 5
    assert value(other, "generation_tokens_total") == 0


def test_buckets_only_grow() -> None:
    metrics: Any = Metrics("m")
    histograms = [item for item in vars(metrics).values() if isinstance(item, Histogram)]
    assert len(histograms) == 10
    for histogram in cast(list[Histogram], histograms):
        assert list(histogram.bounds) == sorted(set(histogram.bounds))
