"""Helpers of metrics' tests: requests that have ended, and a scrape as Prometheus reads it."""

from __future__ import annotations

import attrs
from prometheus_client.parser import text_string_to_metric_families

from trioserve.config import EngineConfig
from trioserve.observability.metrics import Metrics
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.observability.statistics import EngineStatistics
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.prompts import TokensPrompt
from trioserve.requests.request import Finish, FinishReason, Request, Sequence, Times
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.testing import FakeWorker

Labels = tuple[tuple[str, str], ...]


def make_request(times: Times, num_prompt: int, *num_outputs: int, **params: int) -> Request:
    """Return a request with a sequence for each of ``num_outputs``."""
    request = Request(
        id="r",
        prompt=TokensPrompt((1,)),
        params=SamplingParams(n=len(num_outputs), **params),  # type: ignore[arg-type]
        stream=Stream(StreamBudget(1024, 1024)),
        times=times,
        prompt_ids=[1] * num_prompt,
    )
    request.sequences += [
        Sequence(request=request, index=index, sampler=SamplerParams(), output_ids=[2] * count)
        for index, count in enumerate(num_outputs)
    ]
    return request


def finish(metrics: Metrics, sequence: Sequence, reason: FinishReason) -> None:
    """Finish ``sequence`` as the engine does after its last output."""
    sequence.delivered = True
    metrics.request_finished(sequence.request, sequence, Finish(reason))


def samples(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    """Return every sample of a scrape by name and labels, by Prometheus' own parser."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """Return one sample of the engine's own."""
    labels = {"model_name": "m", "engine": "0", **labels}
    return samples(metrics)[f"trioserve:{name}", tuple(sorted(labels.items()))]


def report(index: int, state: str) -> WorkerReport:
    """Return the report of one of two workers with 8 pages together."""
    return WorkerReport(
        index=index,
        state=state,
        device="fake",
        pid=None,
        host="other" if index else None,
        restarts=index,
        last_loss=None,
        num_running=2 * (1 - index),
        num_waiting=3 * index,
        num_steps=7,
        role="both",
        pages_total=4,
        pages_free=1 - index,
        pages_cached=1 + 3 * index,
        decode_ms=1.0,
        plan_bytes=90 * index,
        round_trip_ms=2.0 if index else None,
    )


@attrs.frozen
class Watched:
    """An engine as far as a scrape looks at it."""

    config: EngineConfig = attrs.field(
        factory=lambda: EngineConfig("m", kv_cache_memory_bytes=1 << 20)
    )
    ready: wire.Ready = attrs.field(
        factory=lambda: attrs.evolve(FakeWorker().ready(), num_pages=8, page_size=4)
    )

    def statistics(self) -> EngineStatistics:
        scheduler = SchedulerStatistics(
            num_running=2,
            num_waiting=3,
            plans_in_flight=1,
            pages_total=8,
            pages_held=2,
            pages_cached=5,
            pages_free=1,
            num_preemptions=4,
            prefix_cache_queries=100,
            prefix_cache_hits=60,
            pages_evicted=9,
            pages_offloaded=12,
            pages_onloaded=11,
            host_pages_cached=3,
            host_pages_total=10,
            pages_written=13,
            pages_read=14,
            pages_imported=16,
            disk_pages=15,
            num_steps=7,
            step_us=2_500_000,
            idle_us=250_000,
            launch_us=125_000,
        )
        return EngineStatistics(
            scheduler=scheduler,
            num_tokenizing=1,
            num_streams=6,
            stream_bytes=77,
            worker_restarts=5,
            num_sessions=3,
            front_end_restarts=4,
            workers=(report(0, "running"), report(1, "restarting")),
        )
