"""Figures of records with known results, and by vLLM's formulas, stated again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.load import Limits, Record, Run, figures_of


def vllm_figures(run: Run, limits: dict[str, float]) -> dict[str, Any]:
    """Return the figures of ``vllm bench serve`` for the same requests.

    It keeps start, ttft, itl, latency and output_len of each request, all in seconds.
    """
    good = [record for record in run.records if not record.error and not record.cancelled]
    ttfts = [record.chunks[0] - record.started for record in good]
    itls: list[float] = []
    for record in good:
        most_recent = record.chunks[0]
        for time in record.chunks[1:]:
            itls.append(time - most_recent)
            most_recent = time
    latencies = [record.chunks[-1] - record.started for record in good]
    output_lens = [record.completion_tokens or 0 for record in good]
    tpots, all_tpots = [], []
    for latency, ttft, output_len in zip(latencies, ttfts, output_lens, strict=True):
        tpot = 0.0
        if output_len > 1:
            tpot = (latency - ttft) / (output_len - 1)
            tpots.append(tpot)
        all_tpots.append(tpot)
    metrics = {"ttft": ttfts, "tpot": all_tpots, "e2el": latencies}
    valid = [metrics[name] for name in limits]
    slos = [limit / 1000 for limit in limits.values()]
    good_completed = sum(
        all(slo >= value for slo, value in zip(slos, values, strict=True))
        for values in zip(*valid, strict=True)
    )
    events = [(record.started, 1) for record in good]
    events += [
        (record.started + latency, -1) for record, latency in zip(good, latencies, strict=True)
    ]
    current = peak = 0
    for _, delta in sorted(events):
        current += delta
        peak = max(peak, current)
    first = min(record.started for record in good)
    seconds = np.bincount([int(t - first) for record in good for t in record.chunks])
    spreads = {"ttft": ttfts, "itl": itls, "tpot": tpots, "e2e": latencies}
    return {
        "completed": len(good),
        "request_throughput": len(good) / run.duration,
        "request_goodput": good_completed / run.duration,
        "output_throughput": sum(output_lens) / run.duration,
        "total_token_throughput": (
            sum(record.prompt_tokens or 0 for record in good) + sum(output_lens)
        ) / run.duration,
        "max_output_tokens_per_s": int(seconds.max()),
        "max_concurrent_requests": peak,
        **{
            f"{name}_{statistic}": function(values) * 1000
            for name, values in spreads.items()
            for statistic, function in (
                ("mean", np.mean),
                ("p50", np.median),
                ("p90", lambda values: np.percentile(values, 90)),
                ("p99", lambda values: np.percentile(values, 99)),
            )
            if values
        },
    }  # fmt: skip


TIMES = st.integers(0, 4000).map(lambda n: n / 8)  # exact in binary, so that ties are ties


@st.composite
def records(draw: st.DrawFn) -> Record:
    started = draw(TIMES)
    gaps = draw(st.lists(TIMES, min_size=1, max_size=8))
    chunks = [started + sum(gaps[: number + 1]) for number in range(len(gaps))]
    record = Record(
        started=started,
        chunks=chunks,
        prompt_tokens=draw(st.integers(0, 50)),
        completion_tokens=draw(st.integers(0, 20)),
    )
    fate = draw(st.integers(0, 9))
    if fate == 0:
        record.fail("HTTP 500", "no")
    record.cancelled = fate == 1
    return record


@given(
    st.lists(records(), min_size=1, max_size=12),
    st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), TIMES.map(lambda t: t * 1000)),
)
def test_every_figure_is_what_vllms_formulas_give(
    drawn: list[Record], limits: dict[str, float]
) -> None:
    drawn.append(Record(started=1.0, chunks=[2.0, 3.5], prompt_tokens=4, completion_tokens=2))
    run = Run(concurrency=3, records=drawn, duration=7.0)
    figures = figures_of(run, Limits(**limits))
    expected = vllm_figures(run, limits or {"e2el": math.inf})
    assert figures.completed == expected["completed"]
    pairs = {
        "request_throughput": figures.requests_per_second,
        "request_goodput": figures.good_per_second,
        "output_throughput": figures.output_tokens_per_second,
        "total_token_throughput": figures.total_tokens_per_second,
        "max_output_tokens_per_s": figures.peak_tokens_per_second,
        "max_concurrent_requests": figures.peak_concurrency,
    }
    for name in ("ttft", "itl", "tpot", "e2e"):
        spread = getattr(figures, f"{name}_ms")
        for statistic in ("mean", "p50", "p90", "p99"):
            pairs[f"{name}_{statistic}"] = getattr(spread, statistic)
    for name, value in pairs.items():
        if name in expected:
            assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name
        else:
            assert math.isnan(value)


def known(started: float, *chunks: float, tokens: int, **more: Any) -> Record:
    return Record(
        started=started, chunks=list(chunks), prompt_tokens=10, completion_tokens=tokens, **more
    )


def test_figures_of_three_requests_by_hand() -> None:
    run = Run(
        concurrency=None,
        rate=2.0,
        duration=4.0,
        records=[
            known(0.0, 0.1, 0.3, 0.6, tokens=5, scheduled=0.0, first_text=0.3, cached_tokens=8),
            known(0.5, 0.7, tokens=1, scheduled=0.25, first_text=0.7),
            Record(started=1.0, error="HTTP 429: full", error_kind="HTTP 429", scheduled=1.0),
            known(1.0, 1.1, tokens=1, cancelled=True),
        ],
    )
    figures = figures_of(run, Limits(ttft=150, tpot=125))
    assert (figures.completed, figures.failed, figures.cancelled) == (2, 1, 1)
    assert figures.errors == {"HTTP 429": 1}
    assert (figures.rate, figures.concurrency) == (2.0, None)
    assert (figures.prompt_tokens, figures.completion_tokens, figures.cached_tokens) == (20, 6, 8)
    assert figures.ttft_ms.mean == pytest.approx(150)
    assert figures.first_text_ms.p50 == pytest.approx(250)
    assert figures.itl_ms.p50 == pytest.approx(250)
    assert figures.tpot_ms.mean == pytest.approx(125)
    assert figures.e2e_ms.p50 == pytest.approx(400)
    assert figures.good_per_second == pytest.approx(1 / 4)
    assert figures.events == 4
    assert figures.peak_concurrency == 2
    assert figures.lag_ms is not None
    assert figures.lag_ms.p50 == pytest.approx(0)
    assert figures.lag_ms.mean == pytest.approx(250 / 3)


def test_the_limits_themselves_are_good_enough() -> None:
    run = Run(concurrency=1, records=[known(0.0, 0.25, 0.5, tokens=2)], duration=1.0)
    for limits in (Limits(ttft=250), Limits(tpot=250), Limits(e2el=500), Limits()):
        assert figures_of(run, limits).good_per_second == 1.0
    for limits in (Limits(ttft=249), Limits(tpot=249), Limits(e2el=499), Limits(ttft=9, e2el=900)):
        assert figures_of(run, limits).good_per_second == 0.0
    assert figures_of(run).good_per_second is None


def test_the_share_of_valid_answers_leaves_out_those_without_a_form() -> None:
    def shown(*forms: bool | None) -> float | None:
        answers = [known(0.0, 0.1, tokens=1, valid=form) for form in forms]
        return figures_of(Run(concurrency=1, records=answers, duration=1.0)).valid

    assert shown(True, None, False, True) == pytest.approx(2 / 3)
    assert shown(None) is None
