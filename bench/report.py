"""Results of a comparison: medians over rounds, a table for people, JSON for machines."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import attrs

from bench.rows import Row

__all__ = [
    "OWN",
    "asked",
    "commit",
    "machine",
    "markdown",
    "own_versions",
    "ratios",
    "save",
    "show",
    "table",
    "tables",
]

OWN = "trioserve"
"""This project's server, as results call it."""

_Value = TypeVar("_Value")


# A figure for a table's cell, by its name.
_COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "ttft_p50_ms": ("TTFT p50 ms", "{:.0f}"),
    "ttft_p99_ms": ("TTFT p99 ms", "{:.0f}"),
    "itl_p50_ms": ("ITL p50 ms", "{:.1f}"),
    "itl_p99_ms": ("ITL p99 ms", "{:.1f}"),
    "tpot_p50_ms": ("TPOT p50 ms", "{:.1f}"),
    "burnt_cpu_seconds": ("CPU burnt s", "{:.2f}"),
    "seconds": ("until idle s", "{:.2f}"),
    "pss_mib": ("PSS MiB", "{:.0f}"),
    "pss_anonymous_mib": ("written MiB", "{:.0f}"),
    "pss_files_mib": ("of files MiB", "{:.0f}"),
    "pss_at_start_mib": ("PSS at its start MiB", "{:.0f}"),
    "first_token_seconds": ("first token s", "{:.2f}"),
    "peak_resident_mib": ("peak, resident MiB", "{:.0f}"),
    "healthy_seconds": ("healthy s", "{:.2f}"),
    "server_cpu_seconds": ("server's CPU s", "{:.1f}"),
    "elsewhere_cores": ("cores busy elsewhere", "{:.2f}"),
}


def tables(rows: Sequence[Row]) -> str:
    """A Markdown table for each scenario, under its name."""
    parts = []
    for scenario in _unique(row.scenario for row in rows):
        chosen = [row for row in rows if row.scenario == scenario]
        parts.append(f"### {scenario.replace('_', ' ')}\n\n{table(chosen)}")
    return "\n\n".join(parts)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of one scenario: a row per case and server, medians over the rounds.

    The last column is the first figure of this project's server in the same format by the row's:
    the median of the ratios of each round.
    """
    names = [name for name in _COLUMNS if name in rows[0].values]
    heads = ["case", "server", "rounds", *(_COLUMNS[name][0] for name in names)]
    lines = []
    keys = _unique((row.case, row.format, row.server) for row in rows)
    cases = [key[0] for key in keys]
    for case, format, server in sorted(keys, key=lambda key: cases.index(key[0])):
        same = [row for row in rows if (row.case, row.format, row.server) == (case, format, server)]
        cells = [
            _COLUMNS[name][1].format(statistics.median(row.values[name] for row in same))
            for name in names
        ]
        found = ratios(rows, case, format, OWN, server, names[0])
        last = f"{statistics.median(found):.2f}" if found and server != OWN else ""
        lines.append([case, f"{server} {format}", str(len(same)), *cells, last])
    return markdown([*heads, f"{_COLUMNS[names[0]][0]}: {OWN} / this"], lines)


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    every = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def ratios(
    rows: Sequence[Row], case: str, format: str, server: str, other: str, name: str
) -> list[float]:
    """One server's figure ``name`` by another's, for each round in which both were measured.

    ``rows`` are those of one scenario.
    """
    both: list[dict[int, float]] = [
        {
            row.round: row.values[name]
            for row in rows
            if (row.case, row.format, row.server) == (case, format, who)
        }
        for who in (server, other)
    ]
    return [both[0][round] / both[1][round] for round in both[0] if both[1].get(round)]


def _unique(values: Iterable[_Value]) -> list[_Value]:
    return list(dict.fromkeys(values))


def machine() -> dict[str, Any]:
    """What the figures depend on, of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("OMP_", "KMP_"))
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def own_versions() -> dict[str, str]:
    """The versions of this project and of what it runs on."""
    versions = {"python": platform.python_version()}
    for name in ("trioserve", "torch", "trio", "hypercorn", "tokenizers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a tree that isn't installed
            versions[name] = "unknown"
    return {**versions, "commit": commit()}


def commit() -> str:
    """The revision of this tree, with "-dirty" behind it if files differ; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def show(
    text: str, folder: Path | None, name: str, measurements: Sequence[Any], **facts: Any
) -> None:
    """Print the table ``text``, and :func:`save` it with the measurements if there is a folder."""
    print(text)
    if folder:
        facts = {"versions": own_versions(), **facts, "table": text}
        print(save(folder, name, measurements, facts))


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What a script was asked to measure: its options but for where the result goes."""
    return {name: value for name, value in vars(options).items() if name != "save"}


def save(
    folder: Path,
    name: str,
    measurements: Sequence[Any],
    facts: Mapping[str, Any],
) -> Path:
    """Write everything to ``folder/name-<time>.json`` and return its path.

    Args:
        folder: made if it isn't there.
        name: what was measured.
        measurements: of attrs classes.
        facts: what they depend on: options, versions.
    """
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{now:%Y%m%d-%H%M%S}.json"
    result = {
        "time": now.isoformat(timespec="seconds"),
        "machine": machine(),
        **facts,
        "measurements": [attrs.asdict(m) for m in measurements],
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
