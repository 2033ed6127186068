"""The simulation finds the faults of other servers when they are planted in this one."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import attrs
import numpy as np
import pytest

from tests.faults import planted
from tests.faults.planted import FAULTS, PlantedFault, find, main
from trioserve.engine.routing.policy import Bools, KnownPrefix, Loads, Policy
from trioserve.testing.simulation import draw_scenario, run_scenario
from trioserve.testing.simulation.draw import FIRST_CLUSTERS

FOUND_AT = {
    "drafts after a stop token are part of the output": 1002,
    "a beam that has lost its slot counts with its old continuations": 2297,
    "pages are given away while another worker reads them": 14294,
    "another page than the one that was asked for is handed over": 3150,
    "a page is given away on the host while it is written to the disk": 179,
    "a page on the host is given away before it is read": 91,
    "copies to the host and back are done out of order": 78,
}
"""Seeds at which faults were found last, of those that take long to be found from the first on."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: PlantedFault) -> None:
    last = attrs.evolve(fault, first_seed=FOUND_AT.get(fault.name, fault.first_seed))
    report = find(last, most_seeds=1).report or find(fault, most_seeds=400).report
    assert report is not None
    assert report.violation is not None


def test_a_router_that_is_wrong_is_no_fault() -> None:
    """It doesn't know of what the caches hold, and decides by the loads of some requests ago."""
    seen: list[Loads] = []
    choose = Policy.choose

    def choose_wrongly(
        self: Policy, loads: Loads, prompt: int, prefix: KnownPrefix, among: Bools | None = None
    ) -> int:
        seen.append(copy.deepcopy(loads))
        stale = [each for each in seen[-8:] if len(each) == len(loads)]
        return choose(self, stale[0], prompt, KnownPrefix(cached=np.zeros(len(loads))), among)

    with mock.patch.object(Policy, "choose", choose_wrongly):
        for seed in range(FIRST_CLUSTERS, FIRST_CLUSTERS + 60):
            report = run_scenario(draw_scenario(seed))
            assert report.violation is None, f"seed {seed}: {report.violation}"
    assert len(seen) > 60


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
