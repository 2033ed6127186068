"""The budget of a draft model: what it costs is bounded, however long it is tried."""

from __future__ import annotations

import pytest

from gpu.sampling.drafting.budget import ALLOWED, MOST_DEBT, DraftBudget


def tried(budget: DraftBudget, saved: float, number: int) -> int:
    """Return in how many of ``number`` steps of 2 s there are drafts, which save ``saved`` each."""
    count = 0
    for _ in range(number):
        if not budget.includes(8):
            count += 1
            budget.note(8, saved, 2.0)
    return count


@pytest.mark.parametrize("saved", [1.0, 0.0, -2 * ALLOWED])
def test_drafts_that_pay_or_cost_little_go_on(saved: float) -> None:
    assert tried(DraftBudget(), saved, 2000) == 2000


@pytest.mark.parametrize("cost", [0.05, 0.5, 8.0])
def test_drafts_that_never_pay_cost_what_is_allowed(cost: float) -> None:
    """They cost a share of the time, with a debt and one more trial."""
    number = 10_000
    spent = cost * tried(DraftBudget(), -cost, number)
    assert spent <= 2.0 * (ALLOWED * number + MOST_DEBT) + cost
    assert spent > 2.0 * ALLOWED * number - cost


def test_a_debt_is_paid_off_before_drafts_are_tried_again() -> None:
    budget = DraftBudget()
    assert tried(budget, -2.0, 100) == MOST_DEBT + 1
    # A sequence that begins changes nothing.
    budget.open()
    steps = round(MOST_DEBT / ALLOWED)
    assert tried(budget, -2.0, steps - 92) == 0
    assert tried(budget, -2.0, 200) > 0


def test_drafts_save_nothing_in_advance() -> None:
    """Drafts that have paid for a long time are given up as soon as others."""
    budget = DraftBudget()
    tried(budget, 1.0, 10_000)
    assert tried(budget, -2.0, 100) == MOST_DEBT + 1
