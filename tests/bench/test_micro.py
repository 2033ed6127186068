"""The micro-benchmarks: each case does what it says at any size, and its curve is read right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.micro.__main__ import main, table, verdicts
from bench.micro.cases import CASES
from bench.micro.timing import Timed, growth, time_case


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 5])
async def test_a_case_can_be_repeated(name: str, rows: int) -> None:
    async with CASES[name](rows) as prepared:
        timed = await time_case(name, rows, prepared, seconds=0.0, fewest=3, most=3)
    assert (timed.case, timed.rows, timed.calls) == (name, rows, 3)
    assert timed.wall_us > 0


def of(times: dict[int, float], case: str = "case") -> list[Timed]:
    return [
        Timed(case=case, rows=rows, calls=1, cpu_us=us, wall_us=us, cpu_p95_us=us)
        for rows, us in times.items()
    ]


def test_growth_is_the_power_of_the_size_over_the_upper_half() -> None:
    assert growth(of({1: 50.0, 4: 50.0, 16: 100.0, 64: 400.0, 256: 1600.0})) == pytest.approx(1.0)
    assert growth(of({64: 4096.0, 16: 256.0})) == pytest.approx(2.0)
    assert math.isnan(growth(of({4: 1.0})))


def test_the_table_and_the_targets() -> None:
    timed = of({256: 500.0, 4096: 4100.0}, "scheduler and wire")
    assert table(timed).splitlines()[-1] == "| scheduler and wire | 500 | 4100 | 1.00 | 0.76 |"
    found = [(one.bound, one.reached) for one in verdicts(timed)]
    assert found == [(1.0, 0.5), (4.0, 4.1)]


def test_the_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "policy", "pages", "--rows", "1", "16", "--seconds", "0"]
    assert main([*arguments, "--streams", "0", "--out", str(tmp_path)]) == 0
    assert "| pages |" in capsys.readouterr().out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".png"]
