"""Simulated runs of an engine in virtual time, drawn from seeds, with all invariants checked.

A :class:`Scenario` describes a run in advance: the engine's options, its workers and their faults,
and each client's arrival, request, speed and end. :func:`simulate` runs it with the real engine,
fake workers over memory channels, and a clock that jumps. Invariants are checked after each step,
at each chunk, whenever no task can run, and at the end. A run is deterministic, so a failing seed
fails again::

    python -m trioserve.testing.simulation --seconds 60
    python -m trioserve.testing.simulation --seed 4711 --trace

Reading order: ``scenario`` (possible events), ``draw`` (their random choice), ``world`` and ``run``
(the run), ``watch`` (checks of plans and results), ``expected`` and ``judge`` (checks of clients'
results), ``shrink`` (a smaller scenario with the same failure), ``command`` (the command line).
"""

from __future__ import annotations

from trioserve.testing.simulation.draw import draw_scenario
from trioserve.testing.simulation.run import Report, run_scenario, simulate
from trioserve.testing.simulation.scenario import (
    Departure,
    Fault,
    Scenario,
    SimulatedClient,
    WorkerKind,
)
from trioserve.testing.simulation.shrink import shrink
from trioserve.testing.simulation.trace import Trace, Violation

__all__ = [
    "Departure",
    "Fault",
    "Report",
    "Scenario",
    "SimulatedClient",
    "Trace",
    "Violation",
    "WorkerKind",
    "draw_scenario",
    "run_scenario",
    "shrink",
    "simulate",
]
