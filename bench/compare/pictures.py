"""Plots of a comparison: those of ``trioserve bench``, with a line for each server.

All rounds count together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from bench.compare.contest import Row
from trioserve.load import Run, figures_of
from trioserve.load.measure import Measured
from trioserve.load.report_plots import Plot, distribution_plot, load_plot


def save_pictures(runs: Sequence[tuple[Row, Run]], folder: Path) -> list[Path]:
    """Write a PNG for each plot into ``folder``, named after scenario and format."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in _plots(runs):
        paths.append(folder / f"{name}-{plot.name}.png")
        paths[-1].write_bytes(plot.png())
    return paths


def _plots(runs: Sequence[tuple[Row, Run]]) -> Iterator[tuple[str, Plot]]:
    for scenario, format in dict.fromkeys((row.scenario, row.format) for row, _ in runs):
        name = f"{scenario}-{format}"
        chosen = [(r, run) for r, run in runs if (r.scenario, r.format) == (scenario, format)]
        measured = merged(chosen)
        if len({(one.run.concurrency, one.run.rate) for one in measured}) > 1:
            yield name, load_plot(measured)
        for case in dict.fromkeys(one.label for one in measured):
            same = [one for one in measured if one.label == case]
            named = f"{name}-{case.replace(' ', '-').replace('/', '-per-')}".strip("-")
            yield named, distribution_plot(same, "ttft", f"Time to first token, {case}")
            yield named, distribution_plot(same, "itl", f"Inter-token latency, {case}")


def merged(runs: Sequence[tuple[Row, Run]]) -> list[Measured]:
    """Return the rounds of each case and server as one measurement."""
    measured = []
    for case, server in dict.fromkeys((row.case, row.server) for row, _ in runs):
        rounds = [run for row, run in runs if (row.case, row.server) == (case, server)]
        records = [record for run in rounds for record in run.records]
        duration = sum(run.duration for run in rounds)
        whole = attrs.evolve(rounds[0], records=records, duration=duration)
        figures = figures_of(whole)
        measured.append(Measured(label=case, run=whole, figures=figures, series=server))
    return measured
