"""Times of arrival of requests, drawn before a run from a seed, so that runs are comparable.

Arrivals are seconds from the beginning of a run, in ascending order. A late request doesn't delay
the later ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

ARRIVALS = ("poisson", "constant")
"""Names of the processes for :func:`arrivals`."""


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return ``count`` arrivals of a Poisson process of ``rate`` a second, the last at count /
    rate.

    Gaps are exponential and then scaled so that all arrivals take exactly ``count / rate`` seconds,
    as vLLM's tool does. Otherwise the offered rate itself would vary by ``1 / sqrt(count)`` from
    seed to seed.

    Raises:
        ValueError: no arrivals, or a rate that isn't above 0.
    """
    _check(count, rate)
    chooser = random.Random(seed)
    at, times = 0.0, []
    for _ in range(count):
        at += chooser.expovariate(rate)
        times.append(at)
    scale = (count / rate) / times[-1]
    return [time * scale for time in times]


def constant_arrivals(count: int, rate: float) -> list[float]:
    """Return ``count`` arrivals, one every ``1 / rate`` seconds, the first at once.

    Raises:
        ValueError: no arrivals, or a rate that isn't above 0.
    """
    _check(count, rate)
    return [number / rate for number in range(count)]


def arrivals(process: str, count: int, rate: float, seed: int) -> list[float]:
    """Return the arrivals of the process of that name, one of :data:`ARRIVALS`.

    Raises:
        ValueError: no arrivals, a rate that isn't above 0, or an unknown process.
    """
    if process == "poisson":
        return poisson_arrivals(count, rate, seed)
    if process == "constant":
        return constant_arrivals(count, rate)
    raise ValueError(f"arrivals are {' or '.join(ARRIVALS)}, not {process!r}")


def scaled_arrivals(timestamps: Sequence[float], speed: float) -> list[float]:
    """Return a trace's ``timestamps`` (seconds, ascending) from 0 on, ``speed`` times as fast.

    Raises:
        ValueError: no timestamps, descending ones, or a speed that isn't above 0.
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
