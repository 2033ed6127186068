"""Decode steps as CUDA graphs: captured once for a ladder of batch sizes, then replayed.

A step of a large model is some hundred launches of a few microseconds each, which one thread cannot
issue as fast as the device runs them. A captured step is one launch. Everything in it is fixed but
what device memory says: a step of 5 rows replays the graph of 8, whose last rows are padding that
every kernel skips.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Capturer", "CudaCapturer", "Graph", "GraphLadder", "ladder"]

OnCaptured = Callable[[int, int], None]


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queue the same work again, on the current stream."""


class Capturer(Protocol):
    """Makes graphs whose tensors share one pool of memory: they are not to run side by side."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run ``work`` once as it is, so that everything is loaded, and capture it."""


class CudaCapturer:
    """:class:`Capturer` of the current stream, which must not be the device's default one."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        """See :meth:`Capturer.capture`."""
        stream = torch.cuda.current_stream()
        work()
        graph = torch.cuda.CUDAGraph()
        # A thread that waits for events must not spoil the capture, so it is this thread's alone.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            work()
        return graph


def ladder(max_rows: int) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, then multiples of 8, and ``max_rows`` itself."""
    sizes = {1, 2, 4, *range(8, max_rows, 8), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class GraphLadder:
    """One graph for each of several sizes of the same work."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, Graph] = {}

    @property
    def sizes(self) -> list[int]:
        """All sizes, ascending."""
        return list(self._sizes)

    def capture(
        self, capturer: Capturer, work: Callable[[int], None], on_captured: Callable[[], None]
    ) -> None:
        """Capture ``work(size)`` for every size. ``on_captured`` is called after each.

        The largest comes first: what it allocates is enough for the others.
        """
        for size in reversed(self._sizes):
            self._graphs[size] = capturer.capture(lambda size=size: work(size))  # type: ignore[misc]
            on_captured()

    def size_for(self, rows: int) -> int | None:
        """The smallest size that holds ``rows``; None if none does."""
        index = bisect.bisect_left(self._sizes, rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Queue the work of one of the sizes."""
        self._graphs[size].replay()
