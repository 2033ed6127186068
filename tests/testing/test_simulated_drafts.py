"""Simulated workers that draft tokens, and defects that the simulation finds there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trioserve.requests.request import Sequence
from trioserve.scheduler.drafts import plan_drafts
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.token_counts import TokenCounts
from trioserve.testing.simulation import Scenario, draw_scenario, run_scenario
from trioserve.testing.simulation.draw import FIRST_RAGGED

MOST_SEEDS = 60


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


def _tokens_after_a_stop_id_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(sequence: Sequence, tokens: list[int]) -> Any:
        accepted = [token for token in tokens if token >= 0]
        sequence.output_ids.extend(accepted)
        return tuple(accepted), None

    monkeypatch.setattr("trioserve.scheduler.result_processing._append", append)


def _rejected_drafts_count_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TokenCounts.settle

    def settle(self: TokenCounts, slots: Any, extra: Any) -> None:
        original(self, slots, extra)
        self.computed[slots] += 1

    monkeypatch.setattr(TokenCounts, "settle", settle)


def _drafts_have_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.scheduler.drafts._grow", lambda _, extra, *__: extra)


def _a_row_follows_one_of_unknown_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_drafts_of_settled_rows(builder: Any, memory: Any, max_row_tokens: int) -> None:
        plan_drafts(builder, memory, max_row_tokens)
        memory.counts.unsettled[:] = False

    monkeypatch.setattr("trioserve.scheduler.planning.plan_drafts", plan_drafts_of_settled_rows)


def _log_probabilities_are_those_of_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Results.logprob

    def logprob(self: Results, index: int, params: Any) -> Any:
        row = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return original(self, int(self.offsets[row]), params)

    monkeypatch.setattr(Results, "logprob", logprob)


@pytest.mark.parametrize(
    "plant",
    [
        _tokens_after_a_stop_id_count,
        _rejected_drafts_count_as_computed,
        _drafts_have_no_pages,
        _a_row_follows_one_of_unknown_length,
        _log_probabilities_are_those_of_the_first_token,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    reports = map(run_scenario, drafting_scenarios(MOST_SEEDS))
    assert any(report.violation is not None for report in reports)
