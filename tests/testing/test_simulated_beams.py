"""Simulated clients that search with beams."""

from __future__ import annotations

import itertools

from trioserve.testing.simulation import Scenario, draw_scenario, run_scenario
from trioserve.testing.simulation.draw import FIRST_BEAMS


def searches(scenario: Scenario) -> bool:
    return any(client.beam_width for client in scenario.clients)


def test_some_seeds_have_clients_that_search() -> None:
    assert not any(searches(draw_scenario(seed)) for seed in range(0, FIRST_BEAMS, 13))
    found = [draw_scenario(seed) for seed in range(FIRST_BEAMS, FIRST_BEAMS + 100)]
    assert 30 < sum(map(searches, found)) < 60
    widths = {client.beam_width for scenario in found for client in scenario.clients}
    assert widths == {0, 1, 2, 3, 4}


def test_outputs_are_those_of_a_search_over_all_continuations() -> None:
    scenarios = filter(searches, map(draw_scenario, itertools.count(FIRST_BEAMS)))
    for scenario in itertools.islice(scenarios, 40):
        report = run_scenario(scenario)
        assert report.violation is None, f"seed {scenario.seed}: {report.violation}"
