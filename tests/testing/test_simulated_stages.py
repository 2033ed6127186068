"""Simulated workers with stages."""

from __future__ import annotations

import itertools

from trioserve.testing.simulation import Scenario, draw_scenario, run_scenario
from trioserve.testing.simulation.draw_workers import FIRST_STAGES


def staged_scenarios(count: int) -> list[Scenario]:
    """Return the first scenarios whose workers have stages."""
    scenarios = map(draw_scenario, itertools.count(FIRST_STAGES))
    staged = (each for each in scenarios if each.worker.num_stages > 1)
    return list(itertools.islice(staged, count))


def test_half_of_the_seeds_have_workers_with_stages() -> None:
    assert all(draw_scenario(seed).worker.num_stages == 1 for seed in range(0, FIRST_STAGES, 7))
    found = staged_scenarios(40)
    assert FIRST_STAGES + 60 < found[-1].seed < FIRST_STAGES + 110
    assert {each.worker.num_stages for each in found} == {2, 3, 4}
    assert 10 < sum(each.worker.max_row_tokens > 1 for each in found) < 30


def test_outputs_are_those_of_one_stage_without_drafts() -> None:
    for scenario in staged_scenarios(30):
        report = run_scenario(scenario)
        assert report.violation is None, f"seed {scenario.seed}: {report.violation}"
