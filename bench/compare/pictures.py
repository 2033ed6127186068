"""Plots of a comparison: those of ``trioserve bench``, with a line for each server.

All rounds count together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from bench.compare.contest import Row
from trioserve.load import Run, figures_of
from trioserve.load.measure import Measured
from trioserve.load.report_plots import Plot, distribution_plot, load_plot
from trioserve.load.report_plots import save_plots as save_plots


def plots_of(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yield the plots of each scenario and format, which their names begin with."""
    asked = [row for row in rows if row.run is not None]
    for scenario, format in dict.fromkeys((row.scenario, row.format) for row in asked):
        name = f"{scenario}-{format}"
        measured = merged([r for r in asked if (r.scenario, r.format) == (scenario, format)])
        if len({(one.run.concurrency, one.run.rate) for one in measured}) > 1:
            yield _named(name, load_plot(measured))
        for case in dict.fromkeys(one.label for one in measured):
            same = [one for one in measured if one.label == case]
            named = f"{name}-{case.replace(' ', '-').replace('/', '-per-')}".strip("-")
            yield _named(named, distribution_plot(same, "ttft", f"Time to first token, {case}"))
            yield _named(named, distribution_plot(same, "itl", f"Inter-token latency, {case}"))


def _named(beginning: str, plot: Plot) -> Plot:
    return attrs.evolve(plot, name=f"{beginning}-{plot.name}")


def merged(rows: Sequence[Row]) -> list[Measured]:
    """Return the rounds of each case and server as one measurement."""
    rounds: dict[tuple[str, str], list[Run]] = {}
    for row in rows:
        if row.run is not None:
            rounds.setdefault((row.case, row.server), []).append(row.run)
    measured = []
    for (case, server), runs in rounds.items():
        records = [record for run in runs for record in run.records]
        run = attrs.evolve(runs[0], records=records, duration=sum(run.duration for run in runs))
        measured.append(Measured(label=case, run=run, figures=figures_of(run), series=server))
    return measured
