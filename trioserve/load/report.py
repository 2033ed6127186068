"""The report of measurements as text and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs
import msgspec

from trioserve.load.figures import Figures, Spread
from trioserve.load.measure import Measured
from trioserve.load.records import Record, Run
from trioserve.protocol.machine import Machine
from trioserve.protocol.version import __version__

SPREADS = (
    ("TTFT", "ttft_ms"),
    ("first text", "first_text_ms"),
    ("ITL", "itl_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2e_ms"),
)
"""Titles of the time statistics, with their fields of ``Figures``."""

_LAG_SHOWN_MS = 5.0
"""Lag at the 99th percentile above which the report mentions it, in milliseconds."""


def figures_text(measured: Measured) -> str:
    """Return the figures of one measurement as lines of text."""
    figures = measured.figures
    lines = [
        f"{measured.label}: {figures.completed} requests in {figures.duration:.1f} s, "
        f"{figures.failed} failed, {figures.cancelled} left early",
        f"  {figures.requests_per_second:.2f} requests/s, "
        f"{figures.output_tokens_per_second:.1f} tokens/s out, "
        f"{figures.total_tokens_per_second:.1f} with prompts; "
        f"at most {figures.peak_concurrency} running",
    ]
    if figures.good_per_second is not None:
        lines.append(f"  goodput: {figures.good_per_second:.2f} requests/s within the limits")
    if figures.valid is not None:
        lines.append(f"  {figures.valid:.1%} of the answers that ended by themselves are valid")
    if figures.cached_tokens:
        share = figures.cached_tokens / max(figures.prompt_tokens, 1)
        lines.append(f"  {share:.1%} of the prompts' tokens were cached")
    if figures.lag_ms is not None and figures.lag_ms.p99 > _LAG_SHOWN_MS:
        lines.append(_lag_line(figures.lag_ms, bounded=figures.concurrency is not None))
    if figures.resent:
        lines.append(
            f"  sent again, as the server closed the connection without an answer: {figures.resent}"
        )
    if figures.completed:
        lines += _spread_lines(figures)
    for kind, count in figures.errors.items():
        first = next(r.error for r in measured.run.records if (r.error_kind or "other") == kind)
        lines.append(f"  {count} x {kind}: {first}")
    return "\n".join(lines)


def _lag_line(lag: Spread, *, bounded: bool) -> str:
    if bounded:
        return f"  waited before the bound: {lag.p50:.1f} ms at p50, {lag.p99:.1f} ms at p99"
    return f"  the client sent late: {lag.p99:.1f} ms at p99"


def _spread_lines(figures: Figures) -> list[str]:
    lines = [f"  {'ms':12}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p99"))]
    for title, name in SPREADS:
        spread: Spread = getattr(figures, name)
        values = (spread.mean, spread.p50, spread.p90, spread.p99)
        lines.append(f"  {title:12}" + "".join(f"{value:11.2f}" for value in values))
    return lines


def summary_rows(measured: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of a table with a row per measurement."""
    titles = ["load", "failed", "requests/s", "tokens/s out", "TTFT p50 · p99 ms"]
    titles += ["ITL p50 · p99 ms", "TPOT p50 ms", "E2E p50 ms"]
    series = any(one.series for one in measured)
    goodput = any(one.figures.good_per_second is not None for one in measured)
    rows = []
    for one in measured:
        figures = one.figures
        row = [
            one.label,
            str(figures.failed),
            f"{figures.requests_per_second:.2f}",
            f"{figures.output_tokens_per_second:.1f}",
            f"{figures.ttft_ms.p50:.1f} · {figures.ttft_ms.p99:.1f}",
            f"{figures.itl_ms.p50:.2f} · {figures.itl_ms.p99:.2f}",
            f"{figures.tpot_ms.p50:.2f}",
            f"{figures.e2e_ms.p50:.1f}",
        ]
        if goodput:
            row.append(f"{figures.good_per_second or 0:.2f}")
        rows.append([one.series, *row] if series else row)
    titles += ["goodput/s"] if goodput else []
    return (["server", *titles] if series else titles), rows


def summary_text(measured: Sequence[Measured]) -> str:
    """Return the table of :func:`summary_rows` as text in columns."""
    titles, rows = summary_rows(measured)
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    names = titles.index("load") + 1
    lines = []
    for line in (titles, *rows):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        cells[names:] = [cell.strip().rjust(len(cell)) for cell in cells[names:]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def environment(*packages: str) -> dict[str, Any]:
    """Return facts about this machine, and the versions of trioserve and of ``packages``."""
    machine = Machine()
    versions = {"trioserve": __version__, "python": platform.python_version()}
    for name in ("trio", "msgspec", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "machine": {
            "processor": machine.cpu_name(),
            "features": machine.cpu_features(),
            "cores": machine.cores(),
            "memory_bytes": machine.memory()[0],
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": versions,
    }


def as_json(
    measured: Sequence[Measured], facts: Mapping[str, Any], *, records: bool = False
) -> bytes:
    """Return all figures as JSON, with null for NaN; ``records`` adds each request.

    Times of requests are in seconds from the start of the run.
    """
    runs = []
    for one in measured:
        fields: dict[str, Any] = {"label": one.label, "figures": attrs.asdict(one.figures)}
        if one.series:
            fields["series"] = one.series
        if records:
            fields["records"] = [_record(record, one.run) for record in one.run.records]
        runs.append(fields)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {"time": time, **facts, "runs": runs}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def _record(record: Record, run: Run) -> dict[str, Any]:
    fields = attrs.asdict(record)
    for name in ("started", "first_text", "scheduled", "ended"):
        if fields[name] is not None:
            fields[name] = round(fields[name] - run.started, 6)
    fields["chunks"] = [round(time - run.started, 6) for time in record.chunks]
    return fields
