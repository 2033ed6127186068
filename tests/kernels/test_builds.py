"""Every kernel compiles for every target, within its budget, with the instructions it must have."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from gpu.kernels import FOLDER, KernelSource, catalogue, nvrtc, parameters, sass
from gpu.kernels.__main__ import explain, main, measure
from gpu.kernels.budget import BUDGET, Budget
from gpu.kernels.cubins import CubinCache, default_jobs
from gpu.kernels.targets import TARGETS
from tests.kernels.machine_code import Code, code_of, expected_code

CATALOGUE = catalogue.sources()
NAMES = sorted({source.name for source in CATALOGUE})


def drawn(name: str) -> dict[str, KernelSource]:
    """Return one variant of a kernel for each target."""
    variants = [source for source in CATALOGUE if source.name == name]
    number = int(catalogue.digests(variants)[name], 16)
    return {
        target: variants[(number + place * len(variants) // len(TARGETS)) % len(variants)]
        for place, target in enumerate(TARGETS)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_keeps_its_budget_on_every_target(name: str) -> None:
    """Check one variant for each target, others after each change of the kernel.

    All variants are compiled where the budget is written. Another test checks that it was written
    from these very sources.
    """
    budget = Budget.read(BUDGET.read_text())
    for target, variant in drawn(name).items():
        measured, failures = measure([variant], [target], budget, default_jobs())
        assert failures == []
        (one,) = measured
        assert explain([*budget.violations(one)]) == []
        assert (one.instructions is not None) == (name in budget.instructions)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_the_machine_code_is_what_the_source_says(name: str) -> None:
    """Check the same variants: parameters, products, barriers, waits, and no local memory."""
    for target, variant in drawn(name).items():
        cubin = CubinCache().get(variant, target).cubin
        assert sass.parameter_bytes(cubin) == variant.parameters.itemsize
        (names,) = sass.listings([cubin], target)
        counted = sass.Instructions(names)
        assert counted.like("LDL") == counted.like("STL") == 0, (variant.title, target)
        expected = expected_code(variant)
        if expected is not None:
            assert code_of(names) == expected, (variant.title, target)


def test_a_barrier_between_products_counts() -> None:
    code = code_of(
        ["LDGDEPBAR", "HMMA.16816.F32", "BAR.SYNC", "DEPBAR.LE", "HMMA.16816.F32", "BAR"]
    )
    assert code == Code(products=2, barriers=2, barriers_within=1, groups=1, waits=1)


def test_the_parameters_of_a_cubin_are_those_that_it_was_compiled_for() -> None:
    source = KernelSource(
        name="silu_mul",
        parameters=parameters(("x", "u8"), ("y", "u8"), ("num", "i4")),
        num_threads=64,
    )
    unit = nvrtc.unit(source, "sm_89")
    text = """\
struct Parameters { float* x; float* y; int num; };
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);
extern "C" __global__ void silu_mul(const Parameters p) {
  if (static_cast<int>(threadIdx.x) < p.num) p.x[threadIdx.x] = p.y[threadIdx.x];
}
"""
    built = nvrtc.build(attrs.evolve(unit, text=text))
    assert sass.parameter_bytes(built.cubin) == 24
    smaller = text.replace(" int num;", "").replace("p.num", "9").replace("PARAMETERS_BYTES", "16")
    built = nvrtc.build(attrs.evolve(unit, text=smaller))
    assert sass.parameter_bytes(built.cubin) == 16


def test_the_budget_is_of_these_sources_and_this_compiler() -> None:
    budget = Budget.read(BUDGET.read_text())
    assert list(budget.stale(CATALOGUE)) == []
    assert explain([*budget.outdated(catalogue.digests(CATALOGUE))]) == []
    assert budget.compiler == nvrtc.compiler()
    assert all(list(cost.registers) == list(TARGETS) for cost in budget.costs.values())


def test_the_budget_outlives_a_change_of_the_emulation_alone() -> None:
    text = """\
#ifdef EMULATED
one
#if !defined(OTHER)
two
#else
three
#endif
#else
four
#ifdef EMULATED
five
#endif
#endif
#if !defined(EMULATED)
six
#endif
"""
    kept = catalogue.without_emulation(text).splitlines()
    assert [line for line in kept if not line.startswith("#")] == ["four", "six"]
    assert sum(line.startswith("#if") for line in kept) == kept.count("#endif")
    hardware = (FOLDER / "hardware.cuh").read_text()
    left = catalogue.without_emulation(hardware)
    assert "emulated" not in left
    assert "ex2.approx" in left


@pytest.mark.parametrize(
    "same",
    [
        "f(\"a // b\", '\"', 1'000);\n#define X 2\n",
        "// the first\nf(\"a // b\", '\"', 1'000);  // doesn't count\n#define X 2\n",
        '/* of two\n lines */ f("a // b", \'"\',   1\'000);\n\n\n  #define X\t2 /* "two" */',
    ],
)
def test_comments_and_blank_space_are_no_code(same: str) -> None:
    assert catalogue.code_only(same) == "f(\"a // b\", '\"', 1'000);\n#define X 2"


@pytest.mark.parametrize(
    "other",
    [
        "f(\"a  // b\", '\"', 1'000);\n#define X 2\n",
        "f(\"a // c\", '\"', 1'000);\n#define X 2\n",
        "f(\"a // b\", '\"', 1'001);\n#define X 2\n",
        "f(\"a // b\", '\"', 1'000);\n//#define X 2\n",
    ],
)
def test_a_change_of_code_shows(other: str) -> None:
    assert catalogue.code_only(other) != "f(\"a // b\", '\"', 1'000);\n#define X 2"


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
    assert main(["--kernel", "silu_mul", "--target", "sm_89"]) == 0
    printed = capsys.readouterr().out
    for source in CATALOGUE:
        assert (source.title in printed) == (source.name == "silu_mul")
    assert "all within the budget" in printed


def catalogue_of(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, instructions: str = "[]"
) -> Path:
    """Let the command know one kernel, ``planted``, and a budget of its own."""
    (folder / "planted.cu").write_text(text)
    planted = KernelSource(
        name="planted",
        parameters=parameters(("x", "u8")),
        num_threads=256,
        file=str(folder / "planted.cu"),
    )
    budget = folder / "budget.toml"
    budget.write_text(f"[instructions]\nplanted = {instructions}\n")
    monkeypatch.setattr("gpu.kernels.__main__.sources", lambda: [planted])
    monkeypatch.setattr("gpu.kernels.__main__.BUDGET", budget)
    return budget


PLANTED = """\
struct Parameters { float* x; };
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS) planted(const Parameters p) {
  float sums[48];
#pragma unroll
  for (int i = 0; i < 48; i++) sums[i] = p.x[i * 256 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; i++) p.x[i * 256 + threadIdx.x] = sums[i] * sums[(i * 7 + 5) % 48];
}
"""


def test_a_budget_is_written_and_then_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = catalogue_of(PLANTED.replace("MIN_BLOCKS", "1"), tmp_path, monkeypatch)
    assert main([]) == 1
    assert "not in the budget" in capsys.readouterr().out
    assert main(["--write-budget"]) == 0
    assert main([]) == 0
    assert list(Budget.read(budget.read_text()).costs) == ["planted"]
    written = budget.read_text()
    lowered = re.sub(r"registers = \[\d+", "registers = [9", written)
    budget.write_text(lowered)
    assert main([]) == 1
    assert "registers, the budget says 9" in capsys.readouterr().out
    budget.write_text(written)
    kernel = tmp_path / "planted.cu"
    code = kernel.read_text()
    kernel.write_text(code + "// The same code, from another text.\n")
    assert main([]) == 0
    kernel.write_text(code.replace("sums[48]", "sums[49]"))
    capsys.readouterr()
    assert main([]) == 1
    assert "planted\n  has changed since it was measured" in capsys.readouterr().out


def test_spilled_registers_and_missing_instructions_are_no_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spilling = PLANTED.replace("MIN_BLOCKS", "6")
    catalogue_of(spilling, tmp_path, monkeypatch, instructions='["HMMA", "STG"]')
    assert main(["--write-budget"]) == 1
    printed = capsys.readouterr().out
    assert "bytes of local memory: registers are spilled" in printed
    assert "sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120: has no HMMA instruction" in printed
    assert "no STG" not in printed


def test_a_kernel_that_does_not_compile_fails_and_leaves_the_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = catalogue_of("static_assert(PARAMETERS_BYTES == 1);", tmp_path, monkeypatch)
    before = budget.read_text()
    assert main(["--write-budget"]) == 1
    said = "planted for sm_89: planted.cu(1): error: static assertion failed"
    assert said in capsys.readouterr().out
    assert budget.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "nothing"], "no kernel nothing; there are"),
        (["--target", "sm_70"], "invalid choice: 'sm_70'"),
        (["--write-budget", "--target", "sm_89"], "needs every target"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
