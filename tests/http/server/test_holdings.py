"""Holdings of clients, the order of their eviction, and the budget of unread answers."""

from __future__ import annotations

import random

import attrs
import pytest

from trioserve.http.server.holdings import Holdings, address_of
from trioserve.http.server.unsent import UnsentBudget


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (None, ""),
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:0:1:2:3:4:5", 1), "2001:db8:0:1::"),
        (("fe80::1%eth0", 1), "fe80::"),
    ],
)
def test_the_address_that_holdings_are_counted_by(
    client: tuple[str, int] | None, address: str
) -> None:
    assert address_of(client) == address


def test_the_oldest_of_the_heaviest_address_goes_first() -> None:
    holdings: Holdings[str] = Holdings()
    assert holdings.first_to_go() is None
    for address, holder, amount in [
        *(("a", "a1", 5), ("b", "b1", 4), ("b", "b2", 4), ("a", "a2", 2), ("a", "a1", 2)),
    ]:
        holdings.add(address, holder, amount)
    assert holdings.total == 17
    gone = []
    while (holder := holdings.first_to_go()) is not None:
        gone.append(holder)
        holdings.remove(holder)
    assert gone == ["a1", "b1", "b2", "a2"]
    assert (holdings.total, len(holdings)) == (0, 0)


def test_holdings_add_up_whatever_happens() -> None:
    draw = random.Random(7)
    holdings: Holdings[int] = Holdings()
    held: dict[int, int] = {}
    for _ in range(5000):
        holder, amount = draw.randrange(20), draw.randrange(1, 9)
        if draw.random() < 0.5:
            holdings.add(str(holder % 4), holder, amount)
            held[holder] = held.get(holder, 0) + amount
        else:
            all_of_it = draw.random() < 0.2
            holdings.remove(holder, None if all_of_it else amount)
            held[holder] = 0 if all_of_it else max(held.get(holder, 0) - amount, 0)
        held = {holder: amount for holder, amount in held.items() if amount}
        assert (holdings.total, len(holdings)) == (sum(held.values()), len(held))
        by_address = {
            address: sum(amount for holder, amount in held.items() if holder % 4 == address)
            for address in range(4)
        }
        first = holdings.first_to_go()
        assert (first is None) == (not held)
        assert first is None or by_address[first % 4] == max(by_address.values())


@attrs.define(eq=False)
class Answer:
    address: str
    is_cut_off: bool = False

    def cut_off(self) -> None:
        self.is_cut_off = True


def test_past_the_budget_the_oldest_answer_of_the_heaviest_address_is_cut_off() -> None:
    budget = UnsentBudget(100)
    other, first, second, third = Answer("o"), Answer("a"), Answer("a"), Answer("a")
    for answer, size in ((other, 20), (first, 40), (second, 40)):
        budget.add(answer, size)
    assert budget.total == 100
    budget.add(third, 1)
    assert [each.is_cut_off for each in (other, first, second, third)] == [
        False,
        True,
        False,
        False,
    ]
    assert budget.total == 61
    budget.remove(first, 5)  # Nothing of it is left to forget.
    budget.remove(second, 15)
    assert budget.total == 46


def test_an_answer_that_is_larger_than_the_budget_is_sent_where_it_is_alone() -> None:
    budget = UnsentBudget(100)
    large, small = Answer("a"), Answer("b")
    budget.add(large, 500)
    assert not large.is_cut_off
    budget.add(small, 1)
    assert (large.is_cut_off, small.is_cut_off, budget.total) == (True, False, 1)
