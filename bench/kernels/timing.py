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
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from bench.kernels.roofline import Ceilings

Launch = Callable[[], object]
# A replay is made at least this long, so that an event's resolution of half a microsecond is small.
_REPLAY_SECONDS = 2e-3
_MAX_LAUNCHES, _REPLAYS, _MAX_BUFFER_SETS = 2048, 15, 64
_COPY_BYTES, _MATRIX_SIZE = 4 << 30, 8192


@attrs.frozen
class Recording:
    """Launches that are ready to be timed; ``how`` is ``graph``, or ``eager``, from Python."""

    how: str
    run: Callable[[], object]
    num_launches: int

    def seconds(self) -> float:
        """Return the median time of one launch."""
        return _time(self.run, _REPLAYS) / self.num_launches


def record(launches: Sequence[Launch]) -> Recording:
    """Run each launch once, then prepare to time them, in a CUDA graph where they allow it."""
    run_all = partial(_run_all, launches)
    run_all()  # loads modules, allocates, compiles
    torch.cuda.synchronize()
    try:
        once = _capture(launches, 1)
    except RuntimeError:
        torch.cuda.synchronize()
        return Recording("eager", run_all, len(launches))
    took = min(_time(once.replay, 1) for _ in range(3))
    rounds = math.ceil(_REPLAY_SECONDS / max(took, 1e-6))
    rounds = max(1, min(rounds, _MAX_LAUNCHES // len(launches)))
    graph = once if rounds == 1 else _capture(launches, rounds)
    return Recording("graph", graph.replay, rounds * len(launches))


def _run_all(launches: Sequence[Launch], rounds: int = 1) -> None:
    for _ in range(rounds):
        for launch in launches:
            launch()


def _capture(launches: Sequence[Launch], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run_all(launches, rounds)
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
    """Measure and print the rates of this card, now.

    The copy is larger than any cache, its bytes count read and written; the product is of random
    numbers, since zeros would be faster than any data is.
    """
    source = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * _COPY_BYTES / _median_seconds(lambda: target.copy_(source))
    numbers = {"dtype": torch.bfloat16, "device": "cuda"}
    a, b = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, **numbers) for _ in range(2))
    out = torch.empty_like(a)
    matrix = 2 * _MATRIX_SIZE**3 / _median_seconds(lambda: torch.mm(a, b, out=out))
    copied = f"copy {copy / 1e12:.2f} TB/s (read plus written)"
    print(
        f"{copied}, matrix product {matrix / 1e12:.0f} TFLOP/s (bf16, random numbers)", flush=True
    )
    return Ceilings(copy=copy, matrix=matrix)


def _median_seconds(launch: Launch) -> float:
    recording = record([launch])
    return statistics.median(recording.seconds() for _ in range(3))
