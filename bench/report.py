"""Results of a comparison: medians over rounds, a table for people, JSON for machines."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

from trioserve.load import Figures

__all__ = ["Measurement", "commit", "machine", "own_versions", "save", "table"]


@attrs.frozen(kw_only=True)
class Measurement:
    """One server's figures at one concurrency in one round."""

    server: str
    round: int
    figures: Figures


def table(measurements: Sequence[Measurement], servers: Sequence[str]) -> str:
    """A Markdown table: a row per concurrency and server, medians over the rounds.

    ``first / this`` is the median, over the rounds, of the first server's output rate by the row's
    in the same round.
    """
    lines = [
        "| streams | server | output tokens/s | rounds | first / this | TTFT p50 · p99 ms "
        "| ITL p50 · p99 ms | TPOT p50 ms | E2E p50 s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for streams in sorted({m.figures.concurrency for m in measurements}):
        first = _figures(measurements, servers[0], streams)
        for server in servers:
            lines.append(_row(streams, server, _figures(measurements, server, streams), first))
    return "\n".join(lines)


def _row(streams: int, server: str, figures: list[Figures], first: list[Figures]) -> str:
    rates = [f.output_tokens_per_second for f in figures]
    ratio = "" if figures is first else f"{_ratio(first, figures):.2f}"
    cells = [
        str(streams),
        server,
        f"{statistics.median(rates):.1f}",
        " ".join(f"{rate:.0f}" for rate in rates),
        ratio,
        f"{_median(figures, 'ttft_ms', 'p50'):.0f} · {_median(figures, 'ttft_ms', 'p99'):.0f}",
        f"{_median(figures, 'itl_ms', 'p50'):.1f} · {_median(figures, 'itl_ms', 'p99'):.1f}",
        f"{_median(figures, 'tpot_ms', 'p50'):.1f}",
        f"{_median(figures, 'e2e_ms', 'p50') / 1000:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _figures(measurements: Sequence[Measurement], server: str, streams: int) -> list[Figures]:
    return [
        m.figures
        for m in sorted(measurements, key=lambda m: m.round)
        if m.server == server and m.figures.concurrency == streams
    ]


def _ratio(first: list[Figures], other: list[Figures]) -> float:
    return statistics.median(
        a.output_tokens_per_second / b.output_tokens_per_second
        for a, b in zip(first, other, strict=True)
    )


def _median(figures: list[Figures], name: str, field: str) -> float:
    return float(statistics.median(getattr(getattr(f, name), field) for f in figures))


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


def save(
    folder: Path,
    name: str,
    measurements: Sequence[Measurement],
    facts: Mapping[str, Any],
) -> Path:
    """Write everything to ``folder/name-<time>.json`` and return its path."""
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
