"""Simulated clients that search with beams."""

from __future__ import annotations

import itertools
from typing import Any

from trioserve.testing.simulation import (
    Scenario,
    SimulatedClient,
    WorkerKind,
    draw_scenario,
    run_scenario,
)
from trioserve.testing.simulation.draw import FIRST_BEAMS
from trioserve.testing.simulation.expected import ids_of
from trioserve.testing.simulation.scenario import seed_of


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


def test_a_beam_goes_on_although_its_best_tokens_end_by_stop_strings() -> None:
    """A single token doesn't end the output, and it is not among the best."""
    params: dict[str, Any] = {
        "max_tokens": 12,
        "n": 1,
        "beam_width": 1,
        "length_penalty": 2.0,
        "early_stopping": "never",
        "stop": ("a", "b", "c"),
        "allowed_token_ids": ids_of("abcd"),
    }
    clients = [
        SimulatedClient(
            number=number,
            arrives=0.0,
            prompt="ab" * (1 + number),
            params={**params, "seed": seed_of(0, number)},
        )
        for number in range(8)
    ]
    worker = WorkerKind(
        num_pages=40,
        page_size=4,
        max_model_len=64,
        max_num_batched_tokens=16,
        alphabet=ids_of("abcd"),
    )
    options = {
        "seed": 0,
        "max_num_seqs": 8,
        "max_plans_in_flight": 2,
        "max_num_queued_reqs": 100,
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": True,
        "max_worker_restarts": 0,
        "grammar_timeout": 1.0,
    }
    report = run_scenario(Scenario(seed=0, options=options, worker=worker, clients=tuple(clients)))
    assert report.violation is None
    assert report.outcomes == {"whole": 8}
