"""Cost against size, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.micro.timing import Timed

__all__ = ["plot"]


def plot(timed: Sequence[Timed], path: Path) -> Path:
    """Write a PNG to ``path``: a line for each case, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = sorted({one.rows for one in timed})
    for name in dict.fromkeys(one.case for one in timed):
        mine = sorted((one for one in timed if one.case == name), key=lambda one: one.rows)
        axes.plot([one.rows for one in mine], [one.cpu_us for one in mine], "o-", label=name)
    axes.plot(sizes, sizes, "--", color="grey", linewidth=1, label="1 µs a row")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="rows",
        ylabel="µs of CPU for all of them",
        title="What a part of a step costs",
    )
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
    return path
