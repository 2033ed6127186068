"""One home for what each script prints and saves: tables, verdicts, machine, versions, options.

A table of the documentation has one file in ``bench/results`` for each processor and instruction
set: the table itself and the facts that it depends on.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.protocol.machine import Machine

RESULTS = Path(__file__).parent / "results"


def markdown(heads: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    every = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in every)


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a Markdown table of rows by column; mappings are facts that stay out of it."""
    shown = [
        {head: _cell(value) for head, value in row.items() if not isinstance(value, Mapping)}
        for row in rows
    ]
    heads = list(dict.fromkeys(head for row in shown for head in row))
    return markdown(heads, [[row.get(head, "") for head in heads] for row in shown])


def _cell(value: object) -> object:
    if not isinstance(value, float):
        return "" if value is None else value
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def in_turns(rounds: int, cases: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield each round's number with each case; every other round goes backwards."""
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            print(f"round {number + 1}: {case}", file=sys.stderr, flush=True)
            yield number, case


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


def machine_name() -> str:
    """Return the processor, AMX if it isn't used, and the kernels' instruction set, as a folder."""
    fastest = next(reversed(Machine().kernel_isas()), "torch")
    isa = os.environ.get("TRIOSERVE_CPU_ISA") or fastest
    name = f"{Machine().cpu_name()} {'with amx' if fastest == 'amx' != isa else ''}"
    return f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.{isa}"


def machine() -> dict[str, Any]:
    """Return the facts of this machine that figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": Machine().cpu_name(),
        "name": machine_name(),
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
    # A script that is killed leaves the last result whole.
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(result, indent=1, ensure_ascii=False, default=str) + "\n")
    return part.replace(path)


@attrs.frozen
class Made:
    """The table that a script made, further facts for its file, and the exit code."""

    table: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    status: int = 0


def script(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Run the decorated function if its module is the program: a module's last definition.

    Its keyword arguments are the command line's options; its module or folder names the result.
    """
    if measure.__module__ == "__main__":
        parameters = inspect.signature(measure).parameters
        defaults = {name: each.default for name, each in parameters.items()}

        @functools.wraps(measure)
        def with_options(options: argparse.Namespace) -> Any:
            return measure(**asked(options))

        path = Path(inspect.getfile(measure))
        name = path.parent.name if path.stem == "__main__" else path.stem
        sys.exit(run_script(name, with_options, **defaults))
    return measure


def run_script(
    name: str,
    measure: Callable[[argparse.Namespace], Any],
    arguments: Sequence[str] | None = None,
    **defaults: Any,
) -> int:
    """Parse the command line, have ``measure`` make a table, print it, and save it with ``--save``.

    ``defaults`` are those of :func:`parser_of`. ``measure`` may be async, and returns a table or
    :class:`Made`.
    """
    parser = parser_of(inspect.getmodule(measure).__doc__, **defaults)
    add_save(parser)
    options = parser.parse_args(arguments)
    is_async = inspect.iscoroutinefunction(inspect.unwrap(measure))
    made = trio.run(measure, options) if is_async else measure(options)
    made = made if isinstance(made, Made) else Made(made)
    print(made.table)
    if options.save:
        facts = {"versions": own_versions(), "options": asked(options), **made.facts}
        print(f"saved to {save(options.save, name, made.table, **facts)}")
    return made.status


def parser_of(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with an option of its default's type for each of ``defaults``.

    A sequence takes several values; an empty list is a text that may be given several times. False
    is a switch, None is a text that may be missing.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    for option, default in defaults.items():
        flag = f"--{option.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif default == []:
            parser.add_argument(flag, action="append", default=[], help="again for several")
        elif isinstance(default, (list, tuple)):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    return parser


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add the option that all scripts have."""
    text = "write the table and its facts to a folder (default: this machine's in bench/results)"
    folder = RESULTS / machine_name()
    parser.add_argument("--save", type=Path, nargs="?", const=folder, metavar="FOLDER", help=text)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options but for the folder of the result."""
    return {name: value for name, value in vars(options).items() if name != "save"}
