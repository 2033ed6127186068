"""What comes out of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs

__all__ = ["QUIET", "Row", "busy_cases", "busy_elsewhere"]

QUIET = 0.1
"""Cores that may be busy with something else; with more, figures aren't to be trusted."""


@attrs.frozen(kw_only=True)
class Row:
    """What one server showed in one case of a scenario, in one round.

    ``values`` has ``elsewhere_cores``, the cores that were busy with something that is neither this
    server nor the client, on average: an otherwise idle machine shows less than 0.05. Where servers
    are up together, it has ``server_cpu_seconds``, too: those of all the server's processes during
    the measurement.
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


def busy_cases(rows: Sequence[Row]) -> dict[str, float]:
    """The cores that were busy with something else in each case of each scenario: the median.

    Cases are apart because one that was disturbed doesn't show among many that weren't.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        if "elsewhere_cores" in row.values:
            name = ", ".join(filter(None, (row.scenario.replace("_", " "), row.case)))
            found.setdefault(name, []).append(row.values["elsewhere_cores"])
    return {name: statistics.median(cores) for name, cores in found.items()}


def busy_elsewhere(rows: Sequence[Row]) -> float | None:
    """The cores that were busy with something else, in the case with most; None if unknown."""
    return max(busy_cases(rows).values(), default=None)
