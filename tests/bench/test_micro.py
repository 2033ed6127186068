"""The micro-benchmarks: each case does what it says at any size, and its curve is read right."""

from __future__ import annotations

import math

import pytest

from bench.micro.__main__ import CASES, growth, measure, time_case, verdicts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 5])
async def test_a_case_can_be_repeated(name: str, rows: int) -> None:
    async with CASES[name](rows) as prepared:
        assert await time_case(prepared, seconds=0.0, fewest=3, most=3) >= 0


def test_growth_is_the_power_of_the_size_over_the_upper_half() -> None:
    assert growth({1: 50.0, 4: 50.0, 16: 100.0, 64: 400.0, 256: 1600.0}) == pytest.approx(1.0)
    assert growth({64: 4096.0, 16: 256.0}) == pytest.approx(2.0)
    assert math.isnan(growth({4: 1.0}))


def test_the_targets() -> None:
    case = "scheduler and wire"
    found = [(one.bound, one.reached) for one in verdicts({(case, 256): 500.0, (case, 4096): 4100})]
    assert found == [(1.0, 0.5), (4.0, 4.1)]


async def test_the_table() -> None:
    made = await measure(cases=["policy", "pages"], rows=[1, 16], seconds=0.0)
    assert "| pages |" in made.table
