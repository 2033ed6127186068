"""Times on a GPU: graphs replayed between events, and the card's own copy and matrix rates.

A launch is any function without arguments that puts work on torch's current stream. What is timed
is a CUDA graph of many launches, so the gaps between launches from Python stay out; and the
launches go round several sets of buffers that together are larger than the second-level cache, so
that data comes from memory, as it does in a model of many layers.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch

from bench.kernels.roofline import Ceilings

Launch = Callable[[], object]

# A replay is made at least this long, so that an event's resolution of half a microsecond is small.
_REPLAY_SECONDS = 2e-3
_MAX_LAUNCHES = 2048
_REPLAYS = 15
_MAX_BUFFER_SETS = 64
_COPY_BYTES = 4 << 30
_MATRIX_SIZE = 8192


class Recording(Protocol):
    """Launches that are ready to be timed."""

    @property
    def how(self) -> str:
        """``graph`` or ``eager``; ``dry`` where nothing is timed."""

    def seconds(self) -> float:
        """The median time of one launch; NaN in a dry run."""


class Stopwatch(Protocol):
    """What times launches, or only runs them."""

    def record(self, launches: Sequence[Launch]) -> Recording:
        """Run each launch once, then prepare to time them one after the other."""

    def host_seconds(self, launches: Sequence[Launch]) -> float:
        """What one launch costs the thread that issues it; NaN in a dry run."""


@attrs.frozen
class DryRun:
    """Runs every launch once and times nothing: for the emulation, whose times mean nothing."""

    how: str = "dry"

    def record(self, launches: Sequence[Launch]) -> Recording:
        """See :meth:`Stopwatch.record`."""
        for launch in launches:
            launch()
        return self

    def seconds(self) -> float:
        """No time."""
        return math.nan

    def host_seconds(self, launches: Sequence[Launch]) -> float:
        """No time."""
        return math.nan


class GraphStopwatch:
    """Times launches by replaying a CUDA graph of them.

    Launches that can't be captured are timed one by one from Python instead, and say so.
    """

    def record(self, launches: Sequence[Launch]) -> Recording:
        """See :meth:`Stopwatch.record`."""
        for launch in launches:  # loads modules, allocates, compiles
            launch()
        torch.cuda.synchronize()
        try:
            once = _capture(launches, 1)
        except RuntimeError:
            torch.cuda.synchronize()
            return _Eager(launches)
        took = min(_time(once.replay, 1) for _ in range(3))
        rounds = math.ceil(_REPLAY_SECONDS / max(took, 1e-6))
        rounds = max(1, min(rounds, _MAX_LAUNCHES // len(launches)))
        graph = once if rounds == 1 else _capture(launches, rounds)
        return _Replayed(graph, rounds * len(launches))

    def host_seconds(self, launches: Sequence[Launch]) -> float:
        """See :meth:`Stopwatch.host_seconds`."""
        times = []
        for _ in range(_REPLAYS):
            torch.cuda.synchronize()  # a full queue would make the thread wait
            began = time.perf_counter()
            for launch in launches:
                launch()
            times.append((time.perf_counter() - began) / len(launches))
        torch.cuda.synchronize()
        return statistics.median(times)


class _Replayed:
    how = "graph"

    def __init__(self, graph: torch.cuda.CUDAGraph, num_launches: int) -> None:
        self._graph = graph
        self._num_launches = num_launches

    def seconds(self) -> float:
        return _time(self._graph.replay, _REPLAYS) / self._num_launches


class _Eager:
    how = "eager"

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches

    def seconds(self) -> float:
        return _time(self._run_all, _REPLAYS) / len(self._launches)

    def _run_all(self) -> None:
        for launch in self._launches:
            launch()


def _capture(launches: Sequence[Launch], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph


def _time(run: Callable[[], object], times: int) -> float:
    """The median of ``times`` runs, in seconds, after one that isn't counted."""
    run()
    pairs = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def measure_in_turn(recordings: Sequence[Recording], rounds: int = 3) -> list[list[float]]:
    """Seconds of each recording in each round; all are measured once before any is again."""
    gc.disable()
    try:
        turns = [[recording.seconds() for recording in recordings] for _ in range(rounds)]
    finally:
        gc.enable()
    return [list(times) for times in zip(*turns, strict=True)]


def buffer_sets(bytes_per_set: float, cache_bytes: int) -> int:
    """How many sets of buffers launches should go round so that none is found in the cache.

    Three times the cache, within reason: what a step of a few tokens moves fits the cache however
    many sets there are, and in a model it is there, because the kernel before has just written it.
    """
    return min(_MAX_BUFFER_SETS, max(2, math.ceil(3 * cache_bytes / bytes_per_set)))


def measure_ceilings() -> Ceilings:
    """The rates of this card, now."""
    ceilings = Ceilings(copy=_copy_rate(), matrix=_matrix_rate())
    torch.cuda.empty_cache()
    return ceilings


def _copy_rate() -> float:
    """Bytes read plus written per second, of a copy larger than any cache."""
    source = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _median_seconds(lambda: target.copy_(source))


def _matrix_rate() -> float:
    """Operations per second, on random numbers: zeros would be faster than any data is."""
    size = (_MATRIX_SIZE, _MATRIX_SIZE)
    a = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    return 2 * _MATRIX_SIZE**3 / _median_seconds(lambda: torch.mm(a, b, out=out))


def _median_seconds(launch: Launch) -> float:
    recording = GraphStopwatch().record([launch])
    return statistics.median(recording.seconds() for _ in range(3))
