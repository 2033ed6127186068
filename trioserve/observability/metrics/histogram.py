"""Histograms and their bounds: all of vLLM's bounds, and some finer ones."""

from __future__ import annotations

import bisect
import math

import attrs
import numpy as np
import numpy.typing as npt

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LOOP_LAG_SECONDS = (0.0005, *SHORT_SECONDS[:-2])
STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
TOKENS_PER_SECOND = tuple(float(unit * 10**power) for power in range(4) for unit in (1, 2, 5))
REQUEST_TOKENS = tuple(float(unit * 10**power) for power in range(7) for unit in (1, 2, 5))
NUM_OUTPUTS = (1.0, 2.0, 5.0, 10.0, 20.0)


@attrs.define(eq=False)
class Histogram:
    """Counts of observations by upper bound; the last count is of larger ones."""

    bounds: tuple[float, ...]
    counts: list[int] = attrs.field(init=False)
    total: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times over."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count each of ``values``."""
        places = np.searchsorted(self.bounds, values)
        for place, times in enumerate(np.bincount(places).tolist()):
            self.counts[place] += times
        self.total += float(values.sum())

    def observe_span(self, start: float | None, end: float | None) -> None:
        """Count the time from ``start`` to ``end``, unless one of them is missing."""
        if start is not None and end is not None:
            self.observe(end - start)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs of an upper bound and the observations up to it; the last pair has all."""
        pairs: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            pairs.append(("+Inf" if bound == math.inf else repr(bound), float(seen)))
        return pairs
