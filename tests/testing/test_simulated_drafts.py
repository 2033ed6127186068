"""Simulated workers that draft tokens."""

from __future__ import annotations

import itertools

from trioserve.testing.simulation import Scenario, draw_scenario, run_scenario
from trioserve.testing.simulation.draw_workers import FIRST_RAGGED


def drafting_scenarios(count: int) -> list[Scenario]:
    """Return the first scenarios whose workers draft tokens."""
    scenarios = map(draw_scenario, itertools.count(FIRST_RAGGED))
    drafting = (each for each in scenarios if each.worker.max_row_tokens > 1)
    return list(itertools.islice(drafting, count))


def test_half_of_the_seeds_have_workers_that_draft() -> None:
    assert all(draw_scenario(seed).worker.max_row_tokens == 1 for seed in range(0, 1000, 7))
    last = drafting_scenarios(40)[-1]
    assert FIRST_RAGGED + 60 < last.seed < FIRST_RAGGED + 110


def test_outputs_are_those_of_one_token_a_row() -> None:
    for scenario in drafting_scenarios(25):
        report = run_scenario(scenario)
        assert report.violation is None, f"seed {scenario.seed}: {report.violation}"
