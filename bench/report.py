"""One home for what each script prints and saves: tables, verdicts, machine, versions, options.

A table of the documentation has one file in ``bench/results``: the table itself and the facts that
it depends on.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import trio

RESULTS = Path(__file__).parent / "results"


def markdown(heads: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    every = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in every)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile as NumPy defines it; NaN of nothing."""
    import numpy as np

    return float(np.percentile(values, percent)) if len(values) else float("nan")


def pair(seconds: Sequence[float], digits: int = 1) -> str:
    """Return a cell: p50 and p99 in milliseconds."""
    p50, p99 = (1000 * percentile(seconds, percent) for percent in (50, 99))
    return f"{p50:.{digits}f} · {p99:.{digits}f}"


class Rounds:
    """Figures of cases that are measured in several rounds."""

    def __init__(self) -> None:
        self._found: dict[Any, dict[str, list[float]]] = {}

    def add(self, case: Any, **figures: float) -> None:
        """Note the figures of one case in one round."""
        for name, figure in figures.items():
            self._found.setdefault(case, {}).setdefault(name, []).append(figure)

    def medians(self) -> dict[Any, dict[str, float]]:
        """Return the median of each figure by case, in the order of the first round."""
        return {
            case: {name: statistics.median(values) for name, values in figures.items()}
            for case, figures in self._found.items()
        }

    def ratio(self, case: Any, other: Any, name: str) -> float:
        """Return the median of the rounds' ratios of one case to another."""
        pairs = zip(self._found[case][name], self._found[other][name], strict=True)
        return statistics.median(one / another for one, another in pairs)


@attrs.frozen(kw_only=True)
class Verdict:
    """One target beside the figure that was reached, None where nothing was measured.

    ``reached`` and ``bound`` have the same unit. ``rounds`` is the number of rounds behind the
    figure: the fewer, the more of a verdict is chance.
    """

    what: str
    against: str
    bound: float
    reached: float | None
    at_most: bool = False
    unit: str = "times"
    detail: str = ""
    moonshot: float | None = None
    rounds: int | None = None

    @property
    def met(self) -> bool | None:
        """True if the target was reached, None where nothing was measured."""
        return None if self.reached is None else self._within(self.bound)

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        if self.reached is None:
            return "not measured"
        if self.moonshot is not None and self._within(self.moonshot):
            return "reached, the moonshot too"
        return "reached" if self.met else "**missed**"

    def _within(self, bound: float) -> bool:
        assert self.reached is not None
        return self.reached <= bound if self.at_most else self.reached >= bound


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table with a line for each target."""
    lines = []
    for one in verdicts:
        target = f"{'≤' if one.at_most else '≥'} {one.bound:g} {one.unit}"
        if one.moonshot is not None:
            target += f" (moonshot {one.moonshot:g})"
        reached = "" if one.reached is None else f"{one.reached:.3g} {one.unit}"
        lines.append(
            [one.what, one.against, target, reached, one.rounds or "", one.verdict, one.detail]
        )
    return markdown(["", "against", "target", "measured", "rounds", "", "medians"], lines)


def machine() -> dict[str, Any]:
    """Return the facts of this machine that figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "KMP_"))},
    }


def own_versions(*more: str) -> dict[str, str]:
    """Return the versions of this project, of its libraries and of ``more`` packages."""
    versions = {"python": platform.python_version()}
    for name in ("trioserve", "torch", "trio", "hypercorn", "tokenizers", *more):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a tree that isn't installed
            versions[name] = "unknown"
    return {**versions, "commit": commit()}


def commit() -> str:
    """Return this tree's revision, with "-dirty" behind it if files differ."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def save(folder: Path, name: str, table: str, **facts: Any) -> Path:
    """Write ``folder/name.json``: the table, and the facts that it depends on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    time = datetime.now(UTC).isoformat(timespec="seconds")
    result = {"time": time, "machine": machine(), **facts, "table": table}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, default=str) + "\n")
    return path


@attrs.frozen
class Made:
    """The table that a script made, further facts for its file, and the exit code."""

    table: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    status: int = 0


def verdict_of(title: str, figures: Mapping[str, Any], passed: bool, **facts: Any) -> Made:
    """Return a table of two columns; the exit code is 1 unless the test has ``passed``."""
    table = markdown((title, ""), list(figures.items()))
    return Made(table, {**facts, "passed": passed}, int(not passed))


def run_script(
    name: str,
    measure: Callable[[argparse.Namespace], Any],
    arguments: Sequence[str] | None = None,
    **defaults: Any,
) -> int:
    """Parse the command line, have ``measure`` make a table, print it, and save it with ``--save``.

    Each of ``defaults`` is an option of the default's type: a list takes several values, False is
    a switch, None is a text that may be missing. ``measure`` may be async, and returns a table or
    :class:`Made`.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(measure).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, default in defaults.items():
        flag = f"--{option.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    add_save(parser)
    options = parser.parse_args(arguments)
    made = trio.run(measure, options) if inspect.iscoroutinefunction(measure) else measure(options)
    made = made if isinstance(made, Made) else Made(made)
    print(made.table)
    if options.save:
        facts = {"versions": own_versions(), "options": asked(options), **made.facts}
        print(f"saved to {save(options.save, name, made.table, **facts)}")
    return made.status


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add the option that all scripts have."""
    text = "write the table and its facts to a folder (default: bench/results)"
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, metavar="FOLDER", help=text)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options but for the folder of the result."""
    return {name: value for name, value in vars(options).items() if name != "save"}
