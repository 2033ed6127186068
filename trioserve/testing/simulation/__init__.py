"""Whole lives of an engine, drawn from seeds, in virtual time, with every invariant looked at.

A :class:`Scenario` says beforehand all that happens in one life: the engine's options, what its
workers are like and what befalls them, who comes when, asks for what, reads how slowly and leaves
how. :func:`simulate` runs it: the real engine, with fake workers over memory channels, on a clock
that jumps. What must be true is checked after each step of the engine, at each chunk that a client
gets, whenever nothing can run, and at the end. Nothing is left to chance, so a seed that fails
fails again::

    python -m trioserve.testing.simulation --seconds 60
    python -m trioserve.testing.simulation --seed 4711 --trace

Reading order: ``scenario`` (what can happen), ``draw`` (how it is chosen), ``world`` (it happens),
``watch`` (what plans and results may say), ``expected`` and ``judge`` (what clients have to get),
``shrink`` (a smaller scenario with the same fault), ``command`` (the command line).
"""

from __future__ import annotations

from trioserve.testing.simulation.draw import draw_scenario
from trioserve.testing.simulation.scenario import (
    Departure,
    Fault,
    Scenario,
    SimulatedClient,
    WorkerKind,
)
from trioserve.testing.simulation.shrink import shrink
from trioserve.testing.simulation.trace import Trace, Violation
from trioserve.testing.simulation.world import Report, run_scenario, simulate

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
