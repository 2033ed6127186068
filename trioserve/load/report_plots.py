"""Plots of measurements: latency and throughput against load, distributions, timelines.

matplotlib is an optional dependency (the extra ``bench``); only this module imports it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from trioserve.load.measure import Measured
from trioserve.load.records import Record, Run

_DPI = 110
_BUCKETS = 200
"""Most steps of a timeline."""
_SHORTEST_STEP = 0.1
"""Shortest step in seconds. In less time the events of a batch say nothing about a rate."""
_WIDE = 8
"""Ratio of loads above which the axis is logarithmic."""


@attrs.define(eq=False)
class Plot:
    """A figure, the name of its file, and its title."""

    name: str
    title: str
    figure: Figure
    _png: bytes = b""

    def png(self) -> bytes:
        """Return the figure as a PNG file, drawn on first use."""
        if not self._png:
            data = io.BytesIO()
            FigureCanvasAgg(self.figure)
            self.figure.savefig(data, format="png", dpi=_DPI)
            self._png = data.getvalue()
        return self._png


def plots(measured: Sequence[Measured]) -> Iterator[Plot]:
    """Yield all plots of the measurements; those without a completed request are left out."""
    shown = [one for one in measured if one.figures.completed]
    if len({_load_of(one) for one in shown}) > 1:
        yield load_plot(shown)
    if shown:
        yield distribution_plot(shown, "ttft", "Time to first token")
        yield distribution_plot(shown, "itl", "Inter-token latency")
    for one in shown:
        yield timeline_plot(one)


def save_plots(drawn: Iterable[Plot], folder: Path) -> list[Path]:
    """Write the plots into ``folder`` as PNG, and return their paths.

    Raises:
        OSError: The files can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in drawn:
        path = folder / f"{plot.name}.png"
        path.write_bytes(plot.png())
        paths.append(path)
    return paths


def load_plot(measured: Sequence[Measured]) -> Plot:
    """Plot TTFT, ITL, end-to-end latency and throughput against concurrency or rate."""
    open_loop = any(one.figures.rate is not None for one in measured)
    all_loads = sorted({_load_of(one) for one in measured})
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2).flat
    spreads = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("End-to-end latency", "e2e_ms"))
    for axes, (title, name) in zip(panels, spreads, strict=False):
        for series, points in _series(measured):
            spread = [getattr(one.figures, name) for one in points]
            loads = [_load_of(one) for one in points]
            (line,) = axes.plot(
                loads, [s.p50 for s in spread], marker="o", label=f"{series}p50".strip()
            )
            axes.plot(
                loads, [s.p99 for s in spread], marker="o", linestyle="--",
                color=line.get_color(), alpha=0.6, label=f"{series}p99".strip(),
            )  # fmt: skip
        _label(axes, title, all_loads, open_loop, "ms")
    throughput = figure.axes[3]
    for series, points in _series(measured):
        rates = [one.figures.output_tokens_per_second for one in points]
        throughput.plot(
            [_load_of(one) for one in points], rates, marker="o", label=series.strip() or None
        )
    _label(throughput, "Output tokens per second", all_loads, open_loop, "tokens/s")
    against = "request rate" if open_loop else "concurrency"
    return Plot("load", f"Latency and throughput against {against}", figure)


def _label(axes: Axes, title: str, loads: Sequence[float], open_loop: bool, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("requests/s" if open_loop else "streams")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    if loads[-1] > _WIDE * loads[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def distribution_plot(measured: Sequence[Measured], what: str, title: str) -> Plot:
    """Plot the cumulative distribution of times; ``what`` is ``ttft`` or ``itl``."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for one in measured:
        times = np.sort(np.array(_times(one.run, what))) * 1000
        if times.size:
            shares = np.arange(1, times.size + 1) / times.size
            axes.step(times, shares, where="post", label=f"{one.series} {one.label}".strip())
    axes.set_title(f"{title}: share of values below")
    axes.set_xlabel("ms")
    axes.set_xscale("log")
    for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.set_ylim(0, 1.01)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return Plot(what, f"{title}, as a cumulative distribution", figure)


def _times(run: Run, what: str) -> list[float]:
    good = [record for record in run.records if not record.error and not record.cancelled]
    if what == "ttft":
        return [record.chunks[0] - record.started for record in good]
    return [b - a for record in good for a, b in pairwise(record.chunks)]


def timeline_plot(measured: Measured) -> Plot:
    """Plot the running requests and the events per second over one measurement."""
    run = measured.run
    step = max(run.duration / _BUCKETS, _SHORTEST_STEP)
    edges = np.arange(int(run.duration / step) + 2) * step
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    starts = np.sort([record.started - run.started for record in run.records])
    ends = np.sort([_end_of(record) - run.started for record in run.records])
    times = np.sort(np.concatenate([starts, ends, edges]))
    running = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
    above.step(times, running, where="post")
    above.set_ylabel("running requests")
    above.set_ylim(bottom=0)
    events = np.array([time - run.started for record in run.records for time in record.chunks])
    counts, _ = np.histogram(events, edges)
    below.step(edges[:-1], counts / step, where="post", color="C1")
    below.set_ylabel("events/s")
    below.set_xlabel("seconds")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    name = f"{measured.series} {measured.label}".strip()
    above.set_title(f"{name}: requests and events over time")
    return Plot("timeline-" + _slug(name), f"Timeline: {name}", figure)


def _end_of(record: Record) -> float:
    return record.started if record.ended is None else record.ended


def _load_of(measured: Measured) -> float:
    figures = measured.figures
    return float(figures.concurrency or 0) if figures.rate is None else figures.rate


def _series(measured: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """Return the label and the points of each series, sorted by load."""
    names = dict.fromkeys(one.series for one in measured)
    return [
        (
            f"{name} " if name else "",
            sorted((one for one in measured if one.series == name), key=_load_of),
        )
        for name in names
    ]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
