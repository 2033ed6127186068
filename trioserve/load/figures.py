"""Throughput and latency of a run, as vLLM's benchmark defines them.

- TTFT: from sending a request to the first event with a non-empty ``choices``, even if its text is
  empty; ``first_text_ms`` waits for the first text instead, as other tools do.
- ITL: the gaps between such events (an event may hold several tokens), all requests together.
- E2E: from sending a request to the last such event.
- TPOT: (E2E - TTFT) / (output tokens - 1) for each request of more than one token.

Failed requests count in ``failed`` and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs

from trioserve.load.client import Record
from trioserve.load.loop import Run

__all__ = ["Figures", "Spread", "figures_of"]


@attrs.frozen(kw_only=True)
class Spread:
    """A set of times in milliseconds; NaN all over where there is none."""

    mean: float
    p50: float
    p90: float
    p99: float


@attrs.frozen(kw_only=True)
class Figures:
    """What one run showed. Rates are per second of the whole run."""

    concurrency: int
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


def figures_of(run: Run) -> Figures:
    """The figures of ``run``.

    Raises:
        ValueError: a server named no token counts, so nothing honest can be said.
    """
    good = [record for record in run.records if not record.error]
    prompt_tokens = sum(_counted(record.prompt_tokens) for record in good)
    completion_tokens = sum(_counted(record.completion_tokens) for record in good)
    return Figures(
        concurrency=run.concurrency,
        completed=len(good),
        failed=len(run.records) - len(good),
        duration=run.duration,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        requests_per_second=len(good) / run.duration,
        output_tokens_per_second=completion_tokens / run.duration,
        total_tokens_per_second=(prompt_tokens + completion_tokens) / run.duration,
        ttft_ms=_spread([record.chunks[0] - record.started for record in good]),
        first_text_ms=_spread([r.first_text - r.started for r in good if r.first_text is not None]),
        itl_ms=_spread([b - a for record in good for a, b in pairwise(record.chunks)]),
        tpot_ms=_spread(
            [_tpot(record) for record in good if _counted(record.completion_tokens) > 1]
        ),
        e2e_ms=_spread([record.chunks[-1] - record.started for record in good]),
    )


def _counted(tokens: int | None) -> int:
    if tokens is None:
        raise ValueError("the server's stream named no token counts")
    return tokens


def _tpot(record: Record) -> float:
    return (record.chunks[-1] - record.chunks[0]) / (_counted(record.completion_tokens) - 1)


def _spread(seconds: Sequence[float]) -> Spread:
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
    """Linear between the two nearest ranks, as NumPy's default."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
