"""The simulation finds the faults of other servers when they are planted in this one."""

from __future__ import annotations

import contextlib

import pytest

from tests.faults import planted
from tests.faults.planted import FAULTS, PlantedFault, find, main


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: PlantedFault) -> None:
    report = find(fault, most_seeds=400).report
    assert report is not None
    assert report.violation is not None


def test_a_fault_that_is_not_found_is_told_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = PlantedFault("nothing at all", "nobody's issue", contextlib.nullcontext)
    (noticed,) = [fault for fault in FAULTS if fault.name == "a page is freed twice"]
    monkeypatch.setattr(planted, "FAULTS", [noticed, harmless])
    assert main(["--most-seeds", "2"]) == 1
    assert "| nothing at all | nobody's issue | 2 |" in capsys.readouterr().out
    monkeypatch.setattr(planted, "FAULTS", [noticed])
    assert main(["--most-seeds", "5"]) == 0
