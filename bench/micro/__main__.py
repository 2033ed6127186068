"""Micro-benchmarks of the Python path, by size: ``python -m bench.micro``.

Each case does its part of a step for 1 to 4,096 rows. A call's and a row's CPU time is measured.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Sequence

import attrs

from bench.micro import cases as plain
from bench.micro import loops
from bench.report import Made, Verdict, markdown, script

_STEP_TARGETS = {256: 1.0, 4096: 4.0}
"""Rows to the milliseconds that the scheduler and the wire may take for a step."""
CASES: dict[str, plain.Case] = {
    "pages": plain.pages,
    "prefix tree": plain.prefix_tree,
    "scheduler and wire": plain.scheduler_and_wire,
    "worker's slots": plain.worker_side,
    "detokenizer": plain.detokenizer,
    "stream fan-out": loops.stream_fan_out,
    "server-sent events": loops.server_sent_events,
}
"""By the name in the table."""
Timed = dict[tuple[str, int], float]
"""Microseconds by case and rows."""


async def time_case(prepared: plain.Prepared, *, seconds: float, fewest: int, most: int) -> float:
    """Call a case for about so many seconds; return the median of its processor time, in µs.

    What was there before is out of the garbage collector's sight, as in a server that has run for a
    while; what the case leaves behind is collected as ever.
    """
    gc.collect()
    gc.freeze()
    taken: list[float] = []
    ends = time.perf_counter() + seconds
    while len(taken) < fewest + 1 or (time.perf_counter() < ends and len(taken) < most):
        if waits := prepared.before():
            await waits
        began = time.process_time_ns()
        if waits := prepared.run():
            await waits
        taken.append((time.process_time_ns() - began) / 1000)
    gc.unfreeze()
    return statistics.median(taken[1:])  # the first call fills caches


def table(timed: Timed) -> str:
    """Return a row for each case: µs of a call at each size, of a row at the largest."""
    sizes = sorted({rows for _, rows in timed})
    lines = []
    for name in dict.fromkeys(name for name, _ in timed):
        mine = {rows: us for (case, rows), us in timed.items() if case == name}
        cells = [f"{mine[size]:.0f}" if size in mine else "" for size in sizes]
        last = max(mine)
        lines.append([name, *cells, f"{mine[last] / last:.2f}"])
    heads = ["µs of CPU for so many rows", *sizes, "a row of the most"]
    return markdown(heads, lines)


def verdicts(timed: Timed) -> list[Verdict]:
    """Hold a step's scheduling and messages to their bounds, in milliseconds."""
    case = "scheduler and wire"
    return [
        Verdict(
            what=f"{case}, a step at {rows} rows",
            against="",
            bound=bound,
            reached=timed[case, rows] / 1000,
            at_most=True,
            unit="ms",
        )
        for rows, bound in _STEP_TARGETS.items()
        if (case, rows) in timed
    ]


@script
async def measure(
    *,
    cases: Sequence[str] = tuple(CASES),
    rows: Sequence[int] = (1, 4, 16, 64, 256, 1024, 4096),
    seconds: float = 1.0,
) -> Made:
    """Return the table of every case at every size."""
    timed: Timed = {}
    for name, number in itertools.product(cases, rows):
        async with CASES[name](number) as prepared:
            how = {"seconds": seconds, "fewest": 5, "most": 2000}
            timed[name, number] = await time_case(prepared, **how)
        print(f"{name}, {number} rows: {timed[name, number]:.0f} µs", file=sys.stderr, flush=True)
    return Made(table(timed), {"verdicts": [attrs.asdict(each) for each in verdicts(timed)]})
