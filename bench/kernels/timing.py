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
_MAX_LAUNCHES, _REPLAYS, _MAX_BUFFER_SETS = 2048, 15, 64
_COPY_BYTES, _MATRIX_SIZE = 4 << 30, 8192


class Recording(Protocol):
    """Launches that are ready to be timed; ``how`` is ``graph`` or ``eager``, or ``dry``."""

    how: str

    def seconds(self) -> float:
        """Return the median time of one launch; NaN in a dry run."""


class Stopwatch(Protocol):
    """A watch that times launches, or only runs them."""

    def record(self, launches: Sequence[Launch]) -> Recording:
        """Run each launch once, then prepare to time them one after the other."""

    def host_seconds(self, launches: Sequence[Launch]) -> float:
        """Return the time of the thread that issues one launch; NaN in a dry run."""


@attrs.frozen
class DryRun:
    """A watch that runs every launch once and times nothing, for the emulation."""

    how: str = "dry"

    def record(self, launches: Sequence[Launch]) -> Recording:
        """See :meth:`Stopwatch.record`."""
        for launch in launches:
            launch()
        return self

    def seconds(self) -> float:
        """Return no time."""
        return math.nan

    def host_seconds(self, launches: Sequence[Launch]) -> float:
        """Return no time."""
        return math.nan


class GraphStopwatch:
    """A watch that replays a CUDA graph of launches.

    Launches that can't be captured are timed one by one from Python instead, and say so.
    """

    def record(self, launches: Sequence[Launch]) -> Recording:
        """See :meth:`Stopwatch.record`."""

        def run_all() -> None:
            for launch in launches:
                launch()

        run_all()  # loads modules, allocates, compiles
        torch.cuda.synchronize()
        try:
            once = _capture(launches, 1)
        except RuntimeError:
            torch.cuda.synchronize()
            return _Recorded("eager", run_all, len(launches))
        took = min(_time(once.replay, 1) for _ in range(3))
        rounds = math.ceil(_REPLAY_SECONDS / max(took, 1e-6))
        rounds = max(1, min(rounds, _MAX_LAUNCHES // len(launches)))
        graph = once if rounds == 1 else _capture(launches, rounds)
        return _Recorded("graph", graph.replay, rounds * len(launches))

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


@attrs.frozen
class _Recorded:
    how: str
    run: Callable[[], object]
    num_launches: int

    def seconds(self) -> float:
        return _time(self.run, _REPLAYS) / self.num_launches


def _capture(launches: Sequence[Launch], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph


def _time(run: Callable[[], object], times: int) -> float:
    """Return the median of ``times`` runs, in seconds, after one that isn't counted."""
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
    """Return the seconds of each recording in each round; all take turns."""
    gc.disable()
    try:
        turns = [[recording.seconds() for recording in recordings] for _ in range(rounds)]
    finally:
        gc.enable()
    return [list(times) for times in zip(*turns, strict=True)]


def buffer_sets(bytes_per_set: float, cache_bytes: int) -> int:
    """Return how many sets of buffers launches should go round so that none is in the cache.

    Three times the cache, within reason: what a step of a few tokens moves fits the cache however
    many sets there are, and in a model it is there, because the kernel before has just written it.
    """
    return min(_MAX_BUFFER_SETS, max(2, math.ceil(3 * cache_bytes / bytes_per_set)))


def measure_ceilings() -> Ceilings:
    """Return the rates of this card, now.

    The copy is larger than any cache, its bytes count read and written; the product is of random
    numbers, since zeros would be faster than any data is.
    """
    ceilings = Ceilings(copy=_copy_rate(), matrix=_matrix_rate())
    torch.cuda.empty_cache()
    return ceilings


def _copy_rate() -> float:
    source = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _median_seconds(lambda: target.copy_(source))


def _matrix_rate() -> float:
    numbers = {"dtype": torch.bfloat16, "device": "cuda"}
    a, b = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, **numbers) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _MATRIX_SIZE**3 / _median_seconds(lambda: torch.mm(a, b, out=out))


def _median_seconds(launch: Launch) -> float:
    recording = GraphStopwatch().record([launch])
    return statistics.median(recording.seconds() for _ in range(3))
