"""Micro-benchmarks of the Python path, with curves: ``python -m bench.micro``.

Each case does its part of a step for 1 to 4,096 rows. Printed is the processor time of a call and
of a row; saved are all of it as JSON, and a plot of cost against size. At the end comes one figure:
the processor time of a server's processes for each token, from the socket to the worker and back,
with a worker that computes nothing. ``--help`` has the options.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from bench.front_end.contenders import Setting, cores, own
from bench.front_end.measure import InvalidRun, Measured, Workload, once
from bench.goals import Verdict
from bench.micro.cases import CASES
from bench.micro.plot import plot
from bench.micro.timing import Timed, growth, time_case
from bench.report import markdown, own_versions, save

__all__ = ["main", "table", "verdicts", "whole_path"]

_RESULTS = Path(__file__).parents[1] / "results"
_SIZES = [1, 4, 16, 64, 256, 1024, 4096]
_STEP_TARGETS = {256: 1.0, 4096: 4.0}
"""Rows to the milliseconds that the scheduler and the wire may take for a step."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.micro", description=__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=[*CASES], default=[*CASES], help="which (default: all)")
    add("--rows", type=int, nargs="+", default=_SIZES, help="the sizes")
    add("--seconds", type=float, default=1.0, help="for each case and size")
    add("--streams", type=int, default=256, help="of the whole path; 0 leaves it out")
    add("--out", type=Path, default=_RESULTS, help="folder for the results")
    return parser.parse_args(arguments)


async def time_all(options: argparse.Namespace) -> list[Timed]:
    """Every case at every size."""
    timed = []
    for name in options.cases:
        for rows in options.rows:
            async with CASES[name](rows) as prepared:
                timed.append(
                    await time_case(
                        name, rows, prepared, seconds=options.seconds, fewest=5, most=2000
                    )
                )
        mine = [one for one in timed if one.case == name]
        print(table(mine).splitlines()[-1], flush=True)
    return timed


async def whole_path(streams: int, output_tokens: int = 256) -> Measured:
    """A server with a mock worker, its steps as fast as they go, at so many streams.

    Raises:
        InvalidRun: it failed a request.
    """
    server_cores, client_cores = cores()
    load = Workload(
        streams=streams,
        requests=2 * streams,
        prompt_tokens=32,
        output_tokens=output_tokens,
        client_cores=client_cores,
    )
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            streams=streams, context=1024, server_cores=server_cores, log=Path(folder) / "log"
        )
        async with own(setting) as at, at(0.0) as up:
            return await once("trioserve", 0, up, 0.0, load)


def table(timed: Sequence[Timed]) -> str:
    """A row for each case: microseconds of a call at each size, of a row at the largest."""
    sizes = sorted({one.rows for one in timed})
    lines = []
    for name in dict.fromkeys(one.case for one in timed):
        mine = sorted((one for one in timed if one.case == name), key=lambda one: one.rows)
        times = {one.rows: f"{one.cpu_us:.0f}" for one in mine}
        last = mine[-1]
        lines.append(
            [
                name,
                *(times.get(size, "") for size in sizes),
                f"{last.cpu_us / last.rows:.2f}",
                f"{growth(mine):.2f}",
            ]
        )
    heads = ["µs of CPU for so many rows", *map(str, sizes), "a row of the most", "grows as n^"]
    return markdown(heads, lines)


def verdicts(timed: Sequence[Timed]) -> list[Verdict]:
    """What a step's scheduling and messages take, in milliseconds, beside what they may."""
    return [
        Verdict(
            what=f"scheduler and wire, a step at {one.rows} rows",
            against="",
            bound=_STEP_TARGETS[one.rows],
            reached=one.cpu_us / 1000,
            at_most=True,
            unit="ms",
        )
        for one in timed
        if one.case == "scheduler and wire" and one.rows in _STEP_TARGETS
    ]


async def _main(options: argparse.Namespace) -> int:
    timed = await time_all(options)
    print("\n" + table(timed) + "\n")
    for verdict in verdicts(timed):
        print(f"{verdict.what}: {verdict.reached:.2f}, at most {verdict.bound:g}")
    facts = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": own_versions(),
        "table": table(timed),
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(timed)],
    }
    if options.streams:
        try:
            path = await whole_path(options.streams)
        except InvalidRun as failure:
            print(f"bench: {failure}", file=sys.stderr)
            return 1
        print(
            f"the whole path at {options.streams} streams: {path.server_us_per_token:.1f} µs of "
            f"CPU per token, {path.tokens_per_event:.3f} tokens per event"
        )
        facts["whole_path_us_per_token"] = path.server_us_per_token
    saved = save(options.out, "micro", timed, facts)
    picture = plot(timed, saved.with_suffix(".png"))
    print(f"saved to {os.path.relpath(saved)} and {os.path.relpath(picture)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, plot and save; the exit code."""
    return trio.run(_main, _options(arguments))


if __name__ == "__main__":
    sys.exit(main())
