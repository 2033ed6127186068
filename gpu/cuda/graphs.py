"""Decode steps as CUDA graphs: captured once for a ladder of batch sizes, then replayed.

A step of a large model is some hundred launches of a few microseconds each, which one thread cannot
issue as fast as the device runs them. A captured step is two launches, forward pass and sampling.
Everything in it is fixed but what device memory says: a step of 5 rows replays the graphs of 8,
with padding as its last rows, which every kernel skips.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import torch

T = TypeVar("T")


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queue the same work again, on the current stream."""


class Capturer(Protocol):
    """A maker of graphs. Their tensors share one pool of memory, so no two may run side by side."""

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Run ``work`` once as it is, so that everything is loaded, and capture it.

        What the captured run returned comes with the graph; a replay writes to the same tensors.
        """


class CudaCapturer:
    """:class:`Capturer` of the current stream, which must not be the device's default one."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """See :meth:`Capturer.capture`."""
        work()
        graph = torch.cuda.CUDAGraph()
        # The thread that waits for events must not spoil the capture: it is this thread's alone.
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            result = work()
        return graph, result


def ladder(max_rows: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, then multiples of 8, and ``max_rows`` itself."""
    return _up_to(max_rows, [1, 2, 4, *range(8, max_rows, 8)])


def sharing_ladder(max_rows: int) -> list[int]:
    """Return the batch sizes to capture for steps with shared prefixes: powers of two from 8.

    These graphs have a launch more in every layer. Steps that profit from it save more than some
    rows of padding cost.
    """
    return _up_to(max_rows, [1 << power for power in range(3, max_rows.bit_length())])


def _up_to(largest: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest]


@attrs.frozen
class _Step:
    forward: Graph
    sampling: Graph | None


class GraphLadder:
    """The graphs of decode steps, for several batch sizes; at first for none."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._steps: dict[int, _Step] = {}

    def capture(
        self,
        capturer: Capturer,
        sizes: Sequence[int],
        *,
        prepare: Callable[[int], None],
        forward: Callable[[int], T],
        sample: Callable[[int, T], None] | None,
        on_captured: Callable[[], None],
    ) -> None:
        """Capture both parts of a step for every size.

        ``prepare`` is called before each size is captured and ``on_captured`` after it; ``sample``
        gets what ``forward`` returned, and is None where nothing is drawn. The largest size comes
        first: what it allocates is enough for the others, each of which takes the memory of the one
        before.
        """
        for size in sorted(sizes, reverse=True):
            prepare(size)
            self._capture_size(capturer, size, forward, sample)
            on_captured()
        self._sizes = sorted(self._steps)

    def size_for(self, rows: int) -> int | None:
        """Return the smallest size that holds ``rows``; None if none does."""
        index = bisect.bisect_left(self._sizes, rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay_forward(self, size: int) -> None:
        """Queue the forward pass for one of the sizes."""
        self._steps[size].forward.replay()

    def replay_sampling(self, size: int) -> None:
        """Queue the sampling for one of the sizes, of what its forward pass gave."""
        sampling = self._steps[size].sampling
        assert sampling is not None
        sampling.replay()

    def _capture_size(
        self,
        capturer: Capturer,
        size: int,
        forward: Callable[[int], T],
        sample: Callable[[int, T], None] | None,
    ) -> None:
        forward_graph, result = capturer.capture(lambda: forward(size))
        sampling_graph = None
        if sample is not None:
            sampling_graph, _ = capturer.capture(lambda: sample(size, result))
        self._steps[size] = _Step(forward_graph, sampling_graph)


@attrs.frozen
class Replay:
    """The graphs that a step replays: those of a ladder, which has a ``kind``, for a size."""

    kind: str
    graphs: GraphLadder
    size: int
