"""Every kernel compiles for every target, within its budget, with the instructions it must have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.kernels import FOLDER, KernelSource, catalogue, nvrtc
from gpu.kernels.__main__ import explain, main, measure
from gpu.kernels.budget import read_budget
from gpu.kernels.cubins import default_jobs
from gpu.kernels.targets import TARGETS

CATALOGUE = catalogue.sources()
NAMES = sorted({source.name for source in CATALOGUE})


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_keeps_its_budget_on_every_target(name: str) -> None:
    budget = read_budget()
    variants = [source for source in CATALOGUE if source.name == name]
    measured, failures = measure(variants, list(TARGETS), budget, default_jobs())
    assert failures == []
    assert len(measured) == len(variants) * len(TARGETS)
    broken = [found for each in measured for found in budget.violations(each)]
    assert explain(broken) == []
    assert all(
        (each.instructions is not None) == (name in budget.instructions) for each in measured
    )


def test_the_budget_is_of_this_catalogue_and_this_compiler() -> None:
    budget = read_budget()
    assert list(budget.stale(CATALOGUE)) == []
    assert budget.compiler == nvrtc.compiler()
    assert all(list(cost.registers) == list(TARGETS) for cost in budget.costs.values())


def test_every_source_file_has_a_kernel_in_the_catalogue() -> None:
    listed = {source.path.name for source in CATALOGUE}
    assert {path.name for path in FOLDER.glob("*.cu")} == listed


def test_a_kernel_listed_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu.kernels.silu_mul

    twice = [*gpu.kernels.silu_mul.VARIANTS, gpu.kernels.silu_mul.VARIANTS[0]]
    monkeypatch.setattr(gpu.kernels.silu_mul, "VARIANTS", twice)
    with pytest.raises(ValueError, match=r"listed twice: silu_mul<"):
        catalogue.sources()


def test_the_command_prints_the_table_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kernel", "silu_mul", "--target", "sm_90"]) == 0
    printed = capsys.readouterr().out
    for source in CATALOGUE:
        assert (source.title in printed) == (source.name == "silu_mul")
    assert "all within the budget" in printed


def test_the_command_fails_for_a_kernel_that_does_not_compile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bad.cu").write_text("static_assert(PARAMETERS_BYTES == 1);")
    silu = next(source for source in CATALOGUE if source.name == "silu_mul")
    bad = KernelSource(
        name="bad", parameters=silu.parameters, num_threads=32, file=str(tmp_path / "bad.cu")
    )
    monkeypatch.setattr("gpu.kernels.__main__.sources", lambda: [bad])
    assert main(["--kernel", "bad", "--target", "sm_90"]) == 1
    assert "bad for sm_90: bad.cu(1): error: static assertion failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "nothing"], "no kernel nothing; there are"),
        (["--target", "sm_70"], "invalid choice: 'sm_70'"),
        (["--write-budget", "--target", "sm_90"], "needs every target"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
