"""Whether a series of measurements grows: a straight line through it by least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

Points = Sequence[tuple[float, float]]


@attrs.frozen(kw_only=True)
class Trend:
    """The slope of the line, in units a second, and its standard error, which takes the points for
    independent of each other. NaN where there are too few of them."""

    slope: float
    error: float
    points: int


def trend_of(*lives: Points) -> Trend:
    """The common slope of several series of (seconds, value), each of which has a level of its own.

    That is how a worker's memory is measured: every new one begins anew.
    """
    products = squares = values = 0.0
    count = 0
    used = [life for life in lives if len(life) > 1]
    for life in used:
        middle = math.fsum(time for time, _ in life) / len(life)
        level = math.fsum(value for _, value in life) / len(life)
        products += math.fsum((time - middle) * (value - level) for time, value in life)
        squares += math.fsum((time - middle) ** 2 for time, _ in life)
        values += math.fsum((value - level) ** 2 for _, value in life)
        count += len(life)
    freedom = count - len(used) - 1
    if freedom < 1 or squares == 0:
        return Trend(slope=math.nan, error=math.nan, points=count)
    slope = products / squares
    residual = max(values - slope * products, 0.0)
    return Trend(slope=slope, error=math.sqrt(residual / freedom / squares), points=count)
