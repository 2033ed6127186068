"""Throughput and latency of a run, as vLLM's benchmark defines them.

- TTFT: from sending a request to the first event with a non-empty ``choices``, even if its text is
  empty. ``first_text_ms`` is the time to the first text, as other tools measure it.
- ITL: the gaps between such events, over all requests. An event may hold several tokens.
- E2E: from sending a request to the last such event.
- TPOT: (E2E - TTFT) / (output tokens - 1), for each request with more than one token.
- Goodput: requests per second within all limits (:class:`Limits`).

Failed requests count only in ``failed``, cancelled ones only in ``cancelled``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from trioserve.load.records import Record, Run


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of a good request, in milliseconds; None for no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


@attrs.frozen(kw_only=True)
class Spread:
    """Mean and percentiles of times, in milliseconds; NaN if there are no times."""

    mean: float
    p50: float
    p90: float
    p99: float


@attrs.frozen(kw_only=True)
class Figures:
    """The results of one run. Rates are per second of the run's duration."""

    concurrency: int | None
    completed: int
    failed: int
    duration: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Spread
    first_text_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    rate: float | None = None
    """Offered requests per second in an open loop."""
    cancelled: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server reported as cached."""
    good_per_second: float | None = None
    """Requests per second within the limits; None without limits."""
    valid: float | None = None
    """Share of valid answers among those that weren't cut off, from 0 to 1."""
    errors: Mapping[str, int] = attrs.field(factory=dict)
    """Number of failed requests by kind."""
    events: int = 0
    """Events with a choice. There are fewer than tokens if events hold several tokens."""
    peak_tokens_per_second: int = 0
    """Most events in a second; seconds count from the first request."""
    peak_concurrency: int = 0
    """Most requests that ran at once."""
    lag_ms: Spread | None = None
    """Delay of requests after their scheduled times, in an open loop. With a limit of concurrency
    requests wait for it; without one, more than a few ms mean that the client was too slow.
    """
    resent: int = 0
    """Requests sent twice, because the server closed a connection without an answer."""


def figures_of(run: Run, limits: Limits | None = None) -> Figures:
    """Return the figures of ``run``.

    Raises:
        ValueError: The server reported no token counts, so the figures would be guesses.
    """
    good = [record for record in run.records if not record.error and not record.cancelled]
    failed = [record for record in run.records if record.error]
    prompt_tokens = sum(_counted(record.prompt_tokens) for record in good)
    completion_tokens = sum(_counted(record.completion_tokens) for record in good)
    forms = [record.valid for record in good if record.valid is not None]
    lags = [r.started - r.scheduled for r in run.records if r.scheduled is not None]
    return Figures(
        concurrency=run.concurrency,
        completed=len(good),
        failed=len(failed),
        duration=run.duration,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        requests_per_second=len(good) / run.duration,
        output_tokens_per_second=completion_tokens / run.duration,
        total_tokens_per_second=(prompt_tokens + completion_tokens) / run.duration,
        ttft_ms=spread_of([_ttft(record) for record in good]),
        first_text_ms=spread_of(
            [r.first_text - r.started for r in good if r.first_text is not None]
        ),
        itl_ms=spread_of([b - a for record in good for a, b in pairwise(record.chunks)]),
        tpot_ms=spread_of(
            [_tpot(record) for record in good if _counted(record.completion_tokens) > 1]
        ),
        e2e_ms=spread_of([_latency(record) for record in good]),
        rate=run.rate,
        cancelled=sum(record.cancelled for record in run.records),
        cached_tokens=sum(record.cached_tokens or 0 for record in good),
        good_per_second=None
        if limits is None
        else sum(_keeps(record, limits) for record in good) / run.duration,
        valid=sum(forms) / len(forms) if forms else None,
        errors=dict(Counter(record.error_kind or "other" for record in failed)),
        events=sum(len(record.chunks) for record in good),
        peak_tokens_per_second=_busiest_second(good),
        peak_concurrency=_peak_concurrency(good),
        lag_ms=spread_of(lags) if lags else None,
        resent=sum(record.resent for record in run.records),
    )


def _counted(tokens: int | None) -> int:
    if tokens is None:
        raise ValueError("the server's stream named no token counts")
    return tokens


def _ttft(record: Record) -> float:
    return record.chunks[0] - record.started


def _latency(record: Record) -> float:
    return record.chunks[-1] - record.started


def _tpot(record: Record) -> float:
    """Return the seconds per output token after the first; 0 for an answer of one token."""
    tokens = _counted(record.completion_tokens)
    return (record.chunks[-1] - record.chunks[0]) / (tokens - 1) if tokens > 1 else 0.0


def _keeps(record: Record, limits: Limits) -> bool:
    pairs = (
        (limits.ttft, _ttft(record)),
        (limits.tpot, _tpot(record)),
        (limits.e2el, _latency(record)),
    )
    return all(limit is None or seconds <= limit / 1000 for limit, seconds in pairs)


def _busiest_second(good: Sequence[Record]) -> int:
    if not good:
        return 0
    first = min(record.started for record in good)
    return max(Counter(int(time - first) for record in good for time in record.chunks).values())


def _peak_concurrency(good: Sequence[Record]) -> int:
    # Ends sort first: a request that begins at that moment doesn't overlap.
    steps = sorted(
        [(record.started, 1) for record in good] + [(record.chunks[-1], -1) for record in good]
    )
    running = peak = 0
    for _, step in steps:
        running += step
        peak = max(peak, running)
    return peak


def spread_of(seconds: Sequence[float]) -> Spread:
    """Return mean and percentiles, in milliseconds, of ``seconds``."""
    times = sorted(1000 * value for value in seconds)
    if not times:
        return Spread(mean=math.nan, p50=math.nan, p90=math.nan, p99=math.nan)
    return Spread(
        mean=math.fsum(times) / len(times),
        p50=_percentile(times, 50),
        p90=_percentile(times, 90),
        p99=_percentile(times, 99),
    )


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile, linearly interpolated as ``numpy.percentile`` does."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
