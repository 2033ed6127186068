"""A table of the tutorial: how long the tutorial took on a clean machine.

Made from the record of ``python -m bench.first_time --save`` in ``bench/results``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[2] / "bench" / "results"


def table_lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield the record's table, and a paragraph on where it was taken."""
    machine, versions = record["machine"], record["versions"]
    yield record["table"]
    yield ""
    yield (
        "By `python -m bench.first_time`, in a fresh clone and without an environment, "
        f"on {machine['cores']} cores of an {machine['processor']} with Python "
        f"{versions['python']}, at commit {versions['commit']}; packages were downloaded. What you "
        "read and think comes on top."
    )


def newest_lines() -> Iterator[str]:
    """Yield the lines of the newest record."""
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*/first_time.json")]
    yield from table_lines(max(records, key=lambda record: str(record["time"])))
