"""Every planted defect is caught, and the script that says so can say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.mutations import Inapplicable, apply, judge, run_all
from tests.kernels.planted_defects import DEFECTS, Defect

TESTS = "test_combine_partials.py -k log_sums_far"


@pytest.mark.thorough
def test_every_planted_defect_is_caught() -> None:
    """Without defects the same tests are run by their own files, and by test_sanitizers.py."""
    outcomes = run_all(DEFECTS)
    assert [outcome for outcome in outcomes if outcome.problem or not outcome.caught] == []


@pytest.mark.thorough
def test_what_no_test_notices_survives() -> None:
    file, what = "combine_partials.cu", "BATCH = 16"
    harmless = Defect("another batch size", file, what, "BATCH = 8", TESTS)
    removed = Defect("what isn't there", file, "no such text", "", TESTS)
    refused = Defect("no C++", file, what, "BATCH = ", TESTS)
    no_tests = Defect("no tests", file, what, "BATCH = 8", f"{TESTS}_away")
    outcomes = run_all([harmless, removed, refused, no_tests])
    assert not any(outcome.caught for outcome in outcomes)
    assert outcomes[0].noticed == {"": "", "address": "", "thread": ""}
    problems = [outcome.problem for outcome in outcomes]
    assert problems[0] == ""
    assert problems[1].startswith("stands 0 times in combine_partials.cu")
    assert problems[2].startswith("doesn't compile: error: expected")
    assert problems[3].startswith("the tests ended with 5")


def test_each_defect_changes_one_file(tmp_path: Path) -> None:
    kernels = Path(__file__).parents[2] / "gpu" / "kernels"
    for defect in DEFECTS:
        apply(defect, tmp_path)
        changed = [
            source.name
            for pattern in ("*.cu", "*.cuh")
            for source in kernels.glob(pattern)
            if source.read_bytes() != (tmp_path / source.name).read_bytes()
        ]
        assert changed == [defect.file]


@pytest.mark.parametrize(
    ("code", "log", "noticed"),
    [
        (0, "1 passed", ""),
        (1, "1 failed", "wrong result"),
        (1, "gpu.kernels.emulation.EmulationError: deadlock", "rule broken"),
        (-11, "", "signal 11"),
        (99, "WARNING: ThreadSanitizer: data race (pid=1)", "data race"),
        (99, "==1==ERROR: AddressSanitizer: heap-buffer-overflow", "bad address"),
        (1, "x.cu:3: runtime error: shift exponent 32", "undefined behavior"),
    ],
)
def test_how_it_was_noticed(code: int, log: str, noticed: str) -> None:
    assert judge(code, log) == noticed


@pytest.mark.parametrize(
    ("code", "log"), [(5, "no tests ran"), (2, ""), (1, "E BuildError: ..."), (-1000, "")]
)
def test_what_says_nothing_about_a_defect(code: int, log: str) -> None:
    with pytest.raises(Inapplicable):
        judge(code, log)
