"""Tables of the metrics and of the dashboard's panels.

The first is made from :mod:`trioserve.observability.metrics`, the second from the Grafana dashboard
itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trioserve.observability.metrics.definition import COMMON_LABELS, Definition
from trioserve.observability.metrics.definitions import DEFINITIONS, GROUPS

DASHBOARD = Path(__file__).parent.parent / "grafana" / "trioserve.json"


def metrics_lines() -> Iterator[str]:
    """Yield a Markdown section with a table for every group of metrics."""
    for group, title in GROUPS.items():
        yield f"### {title}"
        yield ""
        yield "| Metric | Type | Labels | Meaning |"
        yield "| --- | --- | --- | --- |"
        yield from (_row(definition) for definition in DEFINITIONS if definition.group == group)
        yield ""


def _row(definition: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in definition.labels)
    if not definition.common:
        labels += ", without " + " and ".join(f"`{label}`" for label in COMMON_LABELS)
    cells = (f"`{definition.exposed_name}`", definition.kind, labels, f"{definition.help}.")
    return "| " + " | ".join(cells) + " |"


def dashboard_lines() -> Iterator[str]:
    """Yield a Markdown table of the dashboard's panels and their descriptions."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    yield "| Panel | What it shows |"
    yield "| --- | --- |"
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield f"| {panel['title']} | {panel['description']} |"
