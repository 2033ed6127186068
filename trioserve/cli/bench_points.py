"""The points of a ``trioserve bench`` sweep, with their requests and arrival times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.bench_work import cancelled, make_work
from trioserve.load.arrivals import arrivals, scaled_arrivals
from trioserve.load.measure import Point
from trioserve.load.sharegpt import DataError
from trioserve.load.texts import Texts
from trioserve.load.traces import TraceRow, load_trace, scaled_lengths, trace_work
from trioserve.load.work import Conversation, request_fields

_STREAMS = 8
_PROMPTS_PER_STREAM = 4
_OPEN_LOOP_SECONDS = 30
_FEWEST_PROMPTS = 16
_MOST_WARM_UPS = 16


def read_trace(options: BenchOptions) -> list[TraceRow]:
    """Read the requests of ``--trace``; none without the option.

    Raises:
        DataError: The file can't be read or isn't a trace.
    """
    if options.trace is None:
        return []
    rows = load_trace(Path(options.trace), unit=options.trace_unit, most=options.num_prompts)
    return scaled_lengths(rows, options.trace_scale)


def is_chat(options: BenchOptions, trace: Sequence[TraceRow]) -> bool:
    """Return True if the requests need the chat endpoint, because messages have roles."""
    if options.endpoint != "auto":
        return options.endpoint == "chat"
    if options.trace is not None:
        return any(row.messages is not None for row in trace)
    return options.dataset in ("chat", "json")


def streams_of(options: BenchOptions) -> tuple[int, ...]:
    """Return the number of streams of each closed loop, by default at most one per prompt."""
    return options.concurrency or (min(_STREAMS, options.num_prompts or _STREAMS),)


def points_of(
    options: BenchOptions, texts: Texts, trace: Sequence[TraceRow] | None = None
) -> tuple[list[Point], list[Conversation]]:
    """Return the points to measure, each with its own prompts, and the warm-up requests.

    Making long prompts may take seconds.

    Args:
        options: The options.
        texts: The source of prompts.
        trace: Requests of ``--trace``; None to read them here.

    Raises:
        UsageError: A file of an option can't be used.
        DataError: The file of conversations or the trace can't be used.
    """
    warm_ups = options.warmup
    if warm_ups is None:
        warm_ups = min(max(streams_of(options)), _MOST_WARM_UPS)
    before = make_work(options, texts, warm_ups, point=-1) if warm_ups else []
    if options.trace is not None:
        return [_trace_point(options, texts, trace or read_trace(options))], before
    if options.request_rate:
        points = [
            _open_point(options, texts, number, rate)
            for number, rate in enumerate(options.request_rate)
        ]
    else:
        points = [
            _closed_point(options, texts, number, streams)
            for number, streams in enumerate(streams_of(options))
        ]
    return _numbered(points), before


def _closed_point(options: BenchOptions, texts: Texts, number: int, streams: int) -> Point:
    count = options.num_prompts or max(_PROMPTS_PER_STREAM * streams, _FEWEST_PROMPTS)
    return Point(work=make_work(options, texts, count, point=number), concurrency=streams)


def _open_point(options: BenchOptions, texts: Texts, number: int, rate: float) -> Point:
    if math.isinf(rate):
        assert options.num_prompts is not None  # BenchOptions refuses inf without it.
        count = options.num_prompts
        times = [0.0] * count
    else:
        count = options.num_prompts or max(math.ceil(_OPEN_LOOP_SECONDS * rate), _FEWEST_PROMPTS)
        times = arrivals(options.arrivals, count, rate, options.seed + number)
    return Point(
        work=make_work(options, texts, count, point=number),
        arrivals=times,
        rate=rate,
        concurrency=options.max_concurrency,
    )


def _trace_point(options: BenchOptions, texts: Texts, rows: Sequence[TraceRow]) -> Point:
    work = trace_work(list(rows), texts, seed=options.seed)
    chat = is_chat(options, rows)
    for number, conversation in enumerate(work, 1):
        # Refuse an invalid request now, not in the middle of the run.
        try:
            request_fields(conversation, 0, [], chat=chat)
        except ValueError as error:
            raise DataError(f"{options.trace}, request {number} by time: {error}") from error
    return Point(
        work=cancelled(options, work, options.seed),
        arrivals=scaled_arrivals([row.at for row in rows], options.trace_speed),
        concurrency=options.max_concurrency,
    )


def _numbered(points: Sequence[Point]) -> list[Point]:
    """Return ``points``, with numbered repetitions of equal points."""
    seen: Counter[str] = Counter()
    told = []
    for point in points:
        seen[point.label] += 1
        told.append(attrs.evolve(point, repetition=seen[point.label]))
    return told
