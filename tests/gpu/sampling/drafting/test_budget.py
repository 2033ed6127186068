"""The budget of a draft model: what it costs is bounded, however long it is tried."""

from __future__ import annotations

import pytest

from gpu.sampling.drafting.budget import ALLOWED, MOST_DEBT, MOST_SAVED, DraftBudget

STEP = 2.0
"""Seconds of a step without drafts."""


def tried(budget: DraftBudget, saved: float, number: int, *, has_drafts: bool = True) -> int:
    """Return in how many of ``number`` steps there are drafts, which save ``saved`` seconds each.

    Without ``has_drafts`` the draft model computes prompts in them.
    """
    count = 0
    for _ in range(number):
        if not budget.includes(8):
            count += 1
            budget.note(8, saved, STEP, has_drafts=has_drafts)
    return count


@pytest.mark.parametrize("saved", [1.0, 0.0, -STEP * ALLOWED])
def test_drafts_that_pay_or_cost_little_go_on(saved: float) -> None:
    assert tried(DraftBudget(), saved, 2000) == 2000


@pytest.mark.parametrize("has_drafts", [True, False])
@pytest.mark.parametrize("cost", [0.05, 0.5, 8.0])
def test_drafts_that_never_pay_cost_what_is_allowed(cost: float, has_drafts: bool) -> None:
    """They cost a share of the time, with a debt and one more trial; prompts, what is spread."""
    number = 10_000
    spent = cost * tried(DraftBudget(), -cost, number, has_drafts=has_drafts)
    most = MOST_DEBT if has_drafts else 100
    assert spent <= STEP * (ALLOWED * number + most) + cost
    assert spent > STEP * ALLOWED * number / 2


def test_a_debt_is_paid_off_before_drafts_are_tried_again() -> None:
    budget = DraftBudget()
    assert tried(budget, -STEP, 100) == MOST_DEBT + 1
    # A sequence that begins changes nothing.
    budget.open()
    steps = round(MOST_DEBT / ALLOWED)
    assert tried(budget, -STEP, steps - 92) == 0
    assert tried(budget, -STEP, 200) > 0


def test_drafts_that_have_paid_may_cost_more_for_a_while() -> None:
    budget = DraftBudget()
    tried(budget, 1.0, 10_000)
    assert tried(budget, -STEP, 100) == MOST_SAVED + MOST_DEBT + 1


def test_a_long_prompt_has_its_time_made_up_for() -> None:
    """Sixteen steps of two and a half each, before drafts that save half a step each."""
    budget = DraftBudget()
    assert tried(budget, -1.5 * STEP, 16, has_drafts=False) == 16
    assert tried(budget, 0.5 * STEP, 1000) == 1000
    budget = DraftBudget()
    tried(budget, -1.5 * STEP, 16, has_drafts=False)
    assert tried(budget, -0.5 * STEP, 1000) < 10


def test_one_disturbed_step_is_no_reason_to_stop_for_long() -> None:
    budget = DraftBudget()
    tried(budget, 0.3, 3)
    budget.note(8, -500 * STEP, STEP, has_drafts=True)
    assert tried(budget, 0.3, 2000) > 300
