"""How long one call takes, and how that grows with its size."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence

import attrs

from bench.micro.fixtures import Prepared

__all__ = ["Timed", "growth", "time_case"]


@attrs.frozen(kw_only=True)
class Timed:
    """One case at one size: medians over so many calls, in microseconds.

    ``cpu_us`` is processor time of this process; ``wall_us`` counts what others do, too.
    """

    case: str
    rows: int
    calls: int
    cpu_us: float
    wall_us: float
    cpu_p95_us: float


async def time_case(
    case: str, rows: int, prepared: Prepared, *, seconds: float, fewest: int, most: int
) -> Timed:
    """Call it for about so many seconds, at least ``fewest`` and at most ``most`` times.

    What was there before is out of the garbage collector's sight, as in a server that has run for a
    while; what the case leaves behind is collected as ever.
    """
    gc.collect()
    gc.freeze()
    cpu: list[float] = []
    wall: list[float] = []
    ends = time.perf_counter() + seconds
    while len(cpu) < fewest + 1 or (time.perf_counter() < ends and len(cpu) < most):
        await prepared.before()
        began, cpu_began = time.perf_counter_ns(), time.process_time_ns()
        await prepared.run()
        cpu.append((time.process_time_ns() - cpu_began) / 1000)
        wall.append((time.perf_counter_ns() - began) / 1000)
    gc.unfreeze()
    # The first call fills caches.
    cpu, wall = sorted(cpu[1:]), sorted(wall[1:])
    return Timed(
        case=case,
        rows=rows,
        calls=len(cpu),
        cpu_us=statistics.median(cpu),
        wall_us=statistics.median(wall),
        cpu_p95_us=cpu[min(int(len(cpu) * 0.95), len(cpu) - 1)],
    )


def growth(timed: Sequence[Timed]) -> float:
    """The power of its size by which one case's time grows over the upper half of its sizes.

    1 is in proportion; the slope of a line through the logarithms. NaN for a single size.
    """
    ordered = sorted(timed, key=lambda each: each.rows)[-(len(timed) + 1) // 2 :]
    if len(ordered) < 2:
        return math.nan
    sizes = [math.log(each.rows) for each in ordered]
    times = [math.log(max(each.cpu_us, 1e-3)) for each in ordered]
    return statistics.linear_regression(sizes, times).slope
