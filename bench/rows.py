"""What comes out of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs

__all__ = ["QUIET", "Row", "busy_elsewhere"]

QUIET = 0.1
"""Cores that may be busy with something else; with more, figures aren't to be trusted."""


@attrs.frozen(kw_only=True)
class Row:
    """What one server showed in one case of a scenario, in one round.

    Where servers are up together, ``values`` has ``server_cpu_seconds``, those of all its processes
    during the measurement, and ``elsewhere_cores``, the cores that were busy with something that is
    neither this server nor the client, on average: an otherwise idle machine shows less than 0.05.
    """

    scenario: str
    case: str
    server: str
    format: str
    round: int
    values: Mapping[str, float]

    @property
    def title(self) -> str:
        """The server as tables call it."""
        return f"{self.server} {self.format}"


def busy_elsewhere(rows: Sequence[Row]) -> float | None:
    """The cores that were busy with something else, the median of ``rows``; None if unknown."""
    found = [row.values["elsewhere_cores"] for row in rows if "elsewhere_cores" in row.values]
    return statistics.median(found) if found else None
