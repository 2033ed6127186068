"""What a fault test found: figures for people and, with machine and versions, for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.report import machine, own_versions

RESULTS = Path(__file__).parent.parent / "results"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as NumPy's default; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Count, median, p99 and largest of ``seconds``, in milliseconds; null where there is none."""
    if not seconds:
        return {"count": 0, "p50_ms": None, "p99_ms": None, "max_ms": None}
    return {
        "count": len(seconds),
        "p50_ms": round(1000 * percentile(seconds, 50), 3),
        "p99_ms": round(1000 * percentile(seconds, 99), 3),
        "max_ms": round(1000 * max(seconds), 3),
    }


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def save(folder: Path, name: str, options: Mapping[str, Any], figures: Mapping[str, Any]) -> Path:
    """Write everything to ``folder/faults-NAME-<time>.json`` and return its path."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"faults-{name}-{now:%Y%m%d-%H%M%S}.json"
    result = {
        "time": now.isoformat(timespec="seconds"),
        "script": f"bench.faults.{name}",
        "machine": machine(),
        "versions": own_versions(),
        "options": dict(options),
        **figures,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
