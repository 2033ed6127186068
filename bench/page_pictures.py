"""The pictures of ``docs/performance.md``: which plots belong to a block, and how it shows them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["pictures_in", "plots_of", "show_plots"]

_THROUGHPUT = (
    "throughput-bf16-load.png",
    "throughput-bf16-32-streams-ttft.png",
    "throughput-bf16-32-streams-itl.png",
)
_PICTURE = re.compile(r"^!\[.*\]\(.*\)$", re.MULTILINE)


def plots_of(name: str, result: Path) -> dict[str, Path]:
    """The plots that lie beside ``result`` and that the block ``name`` shows, by their new names.

    Those of throughput are in a folder of the result's name, see :mod:`bench.pictures`. Another
    script's plot is a file of the result's name.
    """
    if name == "throughput":
        plots = {file: result.with_suffix("") / file for file in _THROUGHPUT}
    else:
        plots = {f"{name}.png": result.with_suffix(".png")}
    return {file: plot for file, plot in plots.items() if plot.exists()}


def show_plots(plots: Mapping[str, Path], folder: Path) -> list[str]:
    """Copy ``plots`` into ``folder``, and give a line of Markdown for each.

    Raises:
        OSError: that isn't possible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, plot in plots.items():
        shutil.copyfile(plot, folder / file)
    return [f"![{Path(file).stem}]({folder.name}/{file})" for file in plots]


def pictures_in(block: str) -> Sequence[str]:
    """The lines of a block that show pictures."""
    return _PICTURE.findall(block)
