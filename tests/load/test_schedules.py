"""Open loops: when requests are to be sent, and that they are, whatever the others do."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.support.load_server import DONE, FakeServer, Script, simple, target, text, usage
from trioserve.load import (
    Conversation,
    GuessedTexts,
    Progress,
    Run,
    Target,
    TraceRow,
    Turn,
    arrivals,
    constant_arrivals,
    figures_of,
    open_loop,
    over_tcp,
    poisson_arrivals,
    scaled_arrivals,
    trace_work,
)

COUNTS = st.integers(1, 300)
RATES = st.floats(0.01, 1000)


@given(COUNTS, RATES, st.integers(0, 1000))
def test_poisson_arrivals_ascend_and_offer_exactly_the_rate(
    count: int, rate: float, seed: int
) -> None:
    times = poisson_arrivals(count, rate, seed)
    assert len(times) == count
    assert all(a <= b for a, b in itertools.pairwise([0.0, *times]))
    assert times[-1] == pytest.approx(count / rate)
    assert times == poisson_arrivals(count, rate, seed) == arrivals("poisson", count, rate, seed)


def test_the_gaps_of_poisson_arrivals_are_exponential() -> None:
    times = poisson_arrivals(20_000, 4.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(0.25)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.03)
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = -math.log(1 - share) / 4.0
        assert sorted(gaps)[int(share * len(gaps))] == pytest.approx(expected, rel=0.08)
    assert poisson_arrivals(50, 4.0, seed=1) != poisson_arrivals(50, 4.0, seed=2)


@given(COUNTS, RATES)
def test_constant_arrivals_are_all_the_same_time_apart(count: int, rate: float) -> None:
    times = constant_arrivals(count, rate)
    assert times[0] == 0
    assert times == pytest.approx([number / rate for number in range(count)])
    assert times == arrivals("constant", count, rate, seed=7)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0.1, 50))
def test_a_traces_times_begin_at_zero_and_keep_their_proportions(
    times: list[float], speed: float
) -> None:
    times.sort()
    scaled = scaled_arrivals(times, speed)
    assert scaled[0] == 0
    assert scaled == pytest.approx([(time - times[0]) / speed for time in times])


@pytest.mark.parametrize(
    "make",
    [
        lambda: poisson_arrivals(0, 1.0, 0),
        lambda: poisson_arrivals(1, 0.0, 0),
        lambda: constant_arrivals(1, math.nan),
        lambda: arrivals("bursts", 1, 1.0, 0),
        lambda: scaled_arrivals([], 1.0),
        lambda: scaled_arrivals([1.0], 0.0),
        lambda: scaled_arrivals([2.0, 1.0], 1.0),
    ],
)
def test_schedules_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"schedule|arrivals are|trace"):
        make()


async def asked(
    script: Callable[[dict[str, Any]], Script], **options: Any
) -> tuple[Run, FakeServer]:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, script)
        run = await open_loop(target(server), **options)
    return run, server


async def test_requests_are_sent_at_their_times_however_slow_the_answers_are(
    autojump_clock: Any,
) -> None:
    times = [0.0, 0.1, 0.2, 3.0, 3.0, 9.0]
    run, server = await asked(
        simple, requests=[{"prompt": str(n)} for n in range(6)], arrivals=times, rate=2.0
    )
    assert [time - run.started for time in server.arrived] == pytest.approx(times)
    assert [r.started - run.started for r in run.records] == pytest.approx(times)
    assert [r.scheduled for r in run.records] == pytest.approx([run.started + t for t in times])
    assert run.duration == pytest.approx(9.0 + 4.5)
    figures = figures_of(run)
    assert (figures.rate, figures.peak_concurrency) == (2.0, 5)
    assert figures.lag_ms is not None
    assert figures.lag_ms.p99 == pytest.approx(0)


async def test_a_client_that_is_late_or_fails_delays_no_other(autojump_clock: Any) -> None:
    """Use a first request that never ends, and a second one with a late connection."""

    def script(body: dict[str, Any]) -> Script:
        return [(1000.0, DONE)] if body["prompt"] == "0" else simple(body)

    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, script)
        calls = itertools.count()

        async def connect() -> trio.abc.Stream:
            if next(calls) == 1:
                await trio.sleep(50)
                raise OSError("no route")
            return await server.connect()

        to = target(server, timeout=60.0)
        to = type(to)(connect=connect, path=to.path, fields=to.fields, timeout=60.0)
        requests = [{"prompt": str(n)} for n in range(4)]
        run = await open_loop(to, requests, [0.0, 1.0, 2.0, 3.0])
        nursery.cancel_scope.cancel()
    assert [record.error_kind for record in run.records] == ["timeout", "no connection", "", ""]
    assert [record.started - run.started for record in run.records] == pytest.approx([0, 1, 2, 3])
    assert run.records[3].chunks[-1] - run.started == pytest.approx(3 + 4.5)


async def test_an_idle_connection_is_used_again(autojump_clock: Any) -> None:
    _, server = await asked(simple, requests=[{}] * 5, arrivals=[0.0, 1.0, 20.0, 21.0, 40.0])
    assert (len(server.requests), server.connections) == (5, 2)


async def test_a_bound_on_an_open_loop_makes_others_wait(autojump_clock: Any) -> None:
    run, server = await asked(simple, requests=[{}] * 3, arrivals=[0.0] * 3, max_concurrency=1)
    assert server.most_active == 1
    assert [r.started - run.started for r in run.records] == pytest.approx([0.0, 4.5, 9.0])
    assert run.concurrency == 1
    figures = figures_of(run)
    assert figures.lag_ms is not None
    assert figures.lag_ms.p50 == pytest.approx(4500)


async def test_a_trace_is_replayed_at_its_times_with_its_lengths(autojump_clock: Any) -> None:
    rows = [
        TraceRow(at=100.0, input_tokens=3, output_tokens=5),
        TraceRow(at=102.0, input_tokens=7, output_tokens=6),
        TraceRow(at=108.0, input_tokens=2, output_tokens=7),
    ]

    def counted(body: dict[str, Any]) -> Script:
        words = len(body["prompt"].split())
        return [(0.5, text("x")), (0.0, usage(words, body["max_tokens"])), (0.0, DONE)]

    run, _ = await asked(
        counted,
        requests=trace_work(rows, GuessedTexts()),
        arrivals=scaled_arrivals([row.at for row in rows], 2.0),
    )
    assert [r.started - run.started for r in run.records] == pytest.approx([0.0, 1.0, 4.0])
    assert [r.prompt_tokens for r in run.records] == [3, 7, 2]
    assert [r.completion_tokens for r in run.records] == [5, 6, 7]


async def test_turns_follow_their_answers_and_the_pauses_between(autojump_clock: Any) -> None:
    turns = [Turn(prompt=str(n), max_tokens=3, pause=10.0 if n else 0.0) for n in range(3)]
    run, server = await asked(
        simple, requests=[Conversation(turns=tuple(turns))] * 2, arrivals=[0.0, 1.0]
    )
    starts = [record.started - run.started for record in run.records]
    assert starts == pytest.approx([0.0, 14.5, 29.0, 1.0, 15.5, 30.0])
    places = [(record.conversation, record.turn) for record in run.records]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    prompts = sorted(body["prompt"] for _, body in server.requests)
    assert prompts[-1] == "0\n\nabc\n\n1\n\nabc\n\n2"
    assert [record.scheduled is None for record in run.records] == [False, True, True] * 2


async def test_progress_counts_while_a_run_goes(autojump_clock: Any) -> None:
    progress = Progress()
    seen = []

    async def look() -> None:
        for _ in range(3):
            await trio.sleep(2.25)
            seen.append((progress.running, progress.done, progress.events))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        server = FakeServer(nursery, simple)
        await open_loop(target(server), [{}, {}], [0.0, 4.0], progress=progress)
    assert seen == [(1, 0, 2), (2, 0, 3), (1, 1, 7)]
    assert (progress.total, progress.done, progress.running, progress.events) == (2, 2, 0, 8)


@pytest.mark.parametrize(
    "wrong", [{"requests": [], "arrivals": []}, {"requests": [{}], "arrivals": []},
              {"requests": [{}], "arrivals": [0.0], "max_concurrency": 0}],
)  # fmt: skip
async def test_an_open_loop_without_sense_is_refused(wrong: dict[str, Any]) -> None:
    nowhere = Target(connect=over_tcp("http://127.0.0.1:1"), path="/", fields={})
    with pytest.raises(ValueError, match="an open loop needs"):
        await open_loop(nowhere, **wrong)
