"""Reduction of a scenario to a smaller one with the same failure."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from trioserve.testing.simulation.run import Report, simulate
from trioserve.testing.simulation.scenario import Scenario


def shrink(report: Report, *, most_runs: int = 300) -> Report:
    """Leave out clients and events as long as the same invariant is violated.

    Args:
        report: Report of a run with a violation.
        most_runs: Most runs to try.
    """
    assert report.violation is not None
    smallest = report
    runs = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(smallest.scenario):
            if runs == most_runs:
                return smallest
            runs += 1
            again = simulate(smaller)
            if (
                again.violation is not None
                and again.violation.invariant == report.violation.invariant
            ):
                smallest, found = again, True
                break
    return smallest


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller scenarios: with half of the clients, or without one client or event."""
    numbers = [client.number for client in scenario.clients]
    half = len(numbers) // 2
    if half > 1:
        yield scenario.only(clients=numbers[half:])
        yield scenario.only(clients=numbers[:half])
    for number in numbers:
        if len(numbers) > 1:
            yield scenario.only(clients=[other for other in numbers if other != number])
    for fault in scenario.faults:
        yield attrs.evolve(
            scenario, faults=tuple(other for other in scenario.faults if other is not fault)
        )
    for change in scenario.adapters:
        yield attrs.evolve(
            scenario, adapters=tuple(other for other in scenario.adapters if other is not change)
        )
    for worker_change in scenario.changes:
        yield attrs.evolve(
            scenario, changes=tuple(each for each in scenario.changes if each is not worker_change)
        )
    for pause in scenario.pauses:
        yield attrs.evolve(
            scenario, pauses=tuple(other for other in scenario.pauses if other is not pause)
        )
