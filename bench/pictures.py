"""Plots of a comparison: latency and throughput against load, and how times are distributed.

They are those of ``trioserve bench``, with a line for each server. All rounds count together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from bench.rows import Row
from trioserve.load import Run, figures_of
from trioserve.load.measure import Measured
from trioserve.load.report_plots import Plot, distribution_plot, load_plot

__all__ = ["merged", "save_pictures"]


def save_pictures(runs: Sequence[tuple[Row, Run]], folder: Path) -> list[Path]:
    """Write a PNG for each plot into ``folder``, named after scenario and format.

    Raises:
        OSError: that isn't possible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in _plots(runs):
        path = folder / f"{name}-{plot.name}.png"
        path.write_bytes(plot.png())
        paths.append(path)
    return paths


def _plots(runs: Sequence[tuple[Row, Run]]) -> Iterator[tuple[str, Plot]]:
    for scenario, format in dict.fromkeys((row.scenario, row.format) for row, _ in runs):
        chosen = [(r, run) for r, run in runs if (r.scenario, r.format) == (scenario, format)]
        name = f"{scenario}-{format}"
        measured = merged(chosen)
        loads = {(one.run.concurrency, one.run.rate) for one in measured}
        if len(loads) > 1:
            yield name, load_plot(measured)
        for case in dict.fromkeys(one.label for one in measured):
            same = [one for one in measured if one.label == case]
            named = f"{name}-{case.replace(' ', '-').replace('/', '-per-')}".strip("-")
            yield named, distribution_plot(same, "ttft", f"Time to first token, {case}")
            yield named, distribution_plot(same, "itl", f"Inter-token latency, {case}")


def merged(runs: Sequence[tuple[Row, Run]]) -> list[Measured]:
    """The rounds of each case and server as one measurement, in the order of the first ones."""
    measured = []
    for case, server in dict.fromkeys((row.case, row.server) for row, _ in runs):
        rounds = [run for row, run in runs if (row.case, row.server) == (case, server)]
        whole = attrs.evolve(
            rounds[0],
            records=[record for run in rounds for record in run.records],
            duration=sum(run.duration for run in rounds),
        )
        figures = figures_of(whole)
        measured.append(Measured(label=case, run=whole, figures=figures, series=server))
    return measured
