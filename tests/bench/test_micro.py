"""The micro-benchmarks: each case does what it says at any size, and its curve is read right."""

from __future__ import annotations

import pytest

from bench.micro.__main__ import CASES, measure, time_case, verdicts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 5])
async def test_a_case_can_be_repeated(name: str, rows: int) -> None:
    async with CASES[name](rows) as prepared:
        assert await time_case(prepared, seconds=0.0, fewest=3, most=3) >= 0


def test_the_targets() -> None:
    case = "scheduler and wire"
    found = [(one.bound, one.reached) for one in verdicts({(case, 256): 500.0, (case, 4096): 4100})]
    assert found == [(1.0, 0.5), (4.0, 4.1)]


async def test_the_table() -> None:
    made = await measure(cases=["pages"], rows=[1, 16], seconds=0.0)
    assert "| pages |" in made.table
