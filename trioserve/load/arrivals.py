"""Arrival times of requests, drawn from a seed before a run, so that runs are comparable.

Arrivals are seconds from the beginning of a run, in ascending order. A late request doesn't delay
the later ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

ARRIVALS = ("poisson", "constant")
"""Names of arrival processes for :func:`arrivals`."""


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return ``count`` arrivals of a Poisson process with ``rate`` arrivals per second.

    As in vLLM's benchmark, the exponential gaps are scaled so that the last arrival is at exactly
    ``count / rate`` seconds. Otherwise the offered rate would vary by ``1 / sqrt(count)`` from seed
    to seed.

    Raises:
        ValueError: ``count`` is below 1, or ``rate`` isn't above 0.
    """
    _check(count, rate)
    rng = random.Random(seed)
    at, times = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        times.append(at)
    scale = (count / rate) / times[-1]
    return [time * scale for time in times]


def constant_arrivals(count: int, rate: float) -> list[float]:
    """Return ``count`` arrivals, one every ``1 / rate`` seconds, the first at 0.

    Raises:
        ValueError: ``count`` is below 1, or ``rate`` isn't above 0.
    """
    _check(count, rate)
    return [number / rate for number in range(count)]


def arrivals(process: str, count: int, rate: float, seed: int) -> list[float]:
    """Return ``count`` arrivals of a process named in :data:`ARRIVALS`.

    Raises:
        ValueError: ``count`` is below 1, ``rate`` isn't above 0, or ``process`` is unknown.
    """
    if process == "poisson":
        return poisson_arrivals(count, rate, seed)
    if process == "constant":
        return constant_arrivals(count, rate)
    raise ValueError(f"arrivals are {' or '.join(ARRIVALS)}, not {process!r}")


def scaled_arrivals(timestamps: Sequence[float], speed: float) -> list[float]:
    """Return the ``timestamps`` of a trace, in seconds from its start, ``speed`` times as fast.

    Raises:
        ValueError: There are no timestamps, they don't ascend, or ``speed`` isn't above 0.
    """
    if not timestamps or speed <= 0:
        raise ValueError("a trace needs timestamps and a speed above 0")
    first = timestamps[0]
    times = [(time - first) / speed for time in timestamps]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise ValueError("a trace's timestamps must ascend")
    return times


def _check(count: int, rate: float) -> None:
    if count < 1 or not rate > 0:
        raise ValueError("a schedule needs at least one arrival and a rate above 0")
