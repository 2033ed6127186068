"""Rates and latencies, as differences between two readings of the counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import msgspec

from trioserve.observability.live.schema import Latency, Quantiles, Rates, WorkerRates
from trioserve.observability.metrics import Metrics
from trioserve.observability.metrics.histogram import (
    FIRST_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS,
    REQUEST_SECONDS,
)
from trioserve.observability.metrics.snapshot import MetricsSnapshot
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.scheduler.iterations import Iteration

LATENCY_SECONDS = 60.0
"""Seconds that latencies look back."""
_BETWEEN = 1.0
"""Seconds between readings that are kept for latencies."""
_BOUNDS = {
    "time_to_first_token": FIRST_TOKEN_SECONDS,
    "inter_token_latency": INTER_TOKEN_SECONDS,
    "queue_time": REQUEST_SECONDS,
    "e2e_latency": REQUEST_SECONDS,
}


@attrs.frozen
class Tally:
    """Totals from the metrics that a snapshot uses, by the names of their attributes."""

    generation_tokens: int
    finished: Mapping[str, int]
    """Outputs by the reason of their end."""
    histograms: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, metrics: Metrics) -> Tally:
        """Return the totals of one process."""
        return cls(
            metrics.generation_tokens,
            dict(metrics.finished),
            {name: list(getattr(metrics, name).counts) for name in _BOUNDS},
        )

    @classmethod
    def of_snapshot(cls, snapshot: MetricsSnapshot) -> Tally:
        """Return the totals of several processes together."""
        empty = {name: [0] * (len(bounds) + 1) for name, bounds in _BOUNDS.items()}
        told = {name: snapshot.histograms[name][0] for name in _BOUNDS.keys() & snapshot.histograms}
        return cls(
            snapshot.numbers.get("generation_tokens", 0),
            {str(key[0]): count for key, count in snapshot.counters.get("finished", ())},
            {**empty, **told},
        )


@attrs.frozen
class Look:
    """A reading of the counters at one moment of trio's clock."""

    time: float
    scheduler: SchedulerStatistics
    tally: Tally


def rates_of(before: Look, after: Look, iterations: Sequence[Iteration]) -> Rates:
    """Return the rates between two readings; ``iterations`` are steps of that time, maybe
    not all.
    """
    seconds = after.time - before.time
    if seconds <= 0:
        return Rates()
    num_finished = sum(after.tally.finished.values()) - sum(before.tally.finished.values())
    num_generated = after.tally.generation_tokens - before.tally.generation_tokens
    rates = worker_rates_of(seconds, before.scheduler, after.scheduler, iterations)
    return Rates(
        **{**msgspec.structs.asdict(rates), "generated_tokens_per_s": num_generated / seconds},
        requests_per_s=num_finished / seconds,
    )


def worker_rates_of(
    seconds: float,
    was: SchedulerStatistics,
    is_: SchedulerStatistics,
    iterations: Sequence[Iteration],
) -> WorkerRates:
    """Return the rates of steps between two readings, ``seconds`` apart."""
    if seconds <= 0:
        return WorkerRates()
    num_steps = is_.num_steps - was.num_steps
    step_us, idle_us = is_.step_us - was.step_us, is_.idle_us - was.idle_us
    rows = [each.num_sequences for each in iterations if each.num_sequences]
    return WorkerRates(
        generated_tokens_per_s=(is_.num_tokens_sampled - was.num_tokens_sampled) / seconds,
        prompt_tokens_per_s=(is_.num_prefill_tokens - was.num_prefill_tokens) / seconds,
        steps_per_s=num_steps / seconds,
        gpu_idle_share=_share(idle_us, step_us + idle_us),
        step_ms=_share(step_us / 1000, num_steps),
        batch_rows=_share(sum(rows), len(rows)),
        cache_hit_share=_share(
            is_.prefix_cache_hits - was.prefix_cache_hits,
            is_.prefix_cache_queries - was.prefix_cache_queries,
        ),
        draft_acceptance_share=_share(
            is_.num_accepted_drafts - was.num_accepted_drafts,
            is_.num_draft_tokens - was.num_draft_tokens,
        ),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def latency_of(before: Look, after: Look) -> Latency:
    """Return the latencies that were observed between two readings."""

    def quantiles(name: str) -> Quantiles | None:
        was, is_ = before.tally.histograms[name], after.tally.histograms[name]
        counts = [b - a for a, b in zip(was, is_, strict=True)]
        if not any(counts):
            return None
        p50, p90, p99 = (quantile(_BOUNDS[name], counts, share) for share in (0.5, 0.9, 0.99))
        return Quantiles(p50, p90, p99)

    return Latency(
        ttft=quantiles("time_to_first_token"),
        itl=quantiles("inter_token_latency"),
        queue=quantiles("queue_time"),
        e2e=quantiles("e2e_latency"),
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return the value that a ``share`` of all observations don't exceed, as Prometheus computes
    it.

    Observations are assumed to spread evenly within a bucket; past the last bound, the bound
    counts.
    """
    rank = share * sum(counts)
    seen = 0
    low = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return low + (bound - low) * max(rank - seen, 0.0) / count
        seen += count
        low = bound
    return bounds[-1]


@attrs.define(eq=False)
class Lately:
    """Readings of the last :data:`LATENCY_SECONDS`, about one for each second."""

    _looks: deque[Look] = attrs.field(init=False, factory=deque)

    def add(self, look: Look) -> Look:
        """Add ``look``; return the oldest reading that isn't too old, which at first is
        ``look``.
        """
        looks = self._looks
        if not looks or look.time >= looks[-1].time + _BETWEEN:
            looks.append(look)
        while len(looks) > 1 and looks[0].time < look.time - LATENCY_SECONDS:
            looks.popleft()
        return looks[0]
