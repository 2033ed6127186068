"""The instruction sets of the compiled kernels: what a machine has, and what a process chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.cpu import library as libraries
from gpu.cpu.build import KERNELS, LibraryBuildError, compile_library
from gpu.cpu.isa import ISAS, CpuInstructions, Extension
from gpu.cpu.library import Library, load_library
from tests.support.kernels import computing_with, isas
from trioserve.protocol.machine import (
    ARCHITECTURES,
    KERNEL_FEATURES,
    KERNEL_ISAS,
    Machine,
    compiler_version,
)

needs_kernels = pytest.mark.skipif(not isas(), reason="no compiled kernels")


X86, ARM = ARCHITECTURES["x86-64"], ARCHITECTURES["AArch64"]


def machine_with(tmp_path: Path, flags: str, vendor: str = "AuthenticAMD") -> Machine:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"vendor_id : {vendor}\nflags : {flags}\n")
    return Machine(tmp_path)


def arm_machine(tmp_path: Path, features: str, part: str = "0xd40") -> Machine:
    """Return a machine as Linux describes it on ARM."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        f"processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: {features}\n"
        f"CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: {part}\n"
    )
    return Machine(tmp_path)


def test_every_instruction_set_can_be_compiled_for() -> None:
    assert tuple(ISAS) == KERNEL_ISAS
    assert {isa.kernels for isa in ISAS.values()} == set(KERNELS)
    assert (*X86, *ARM) == KERNEL_ISAS


@pytest.mark.parametrize("isa", X86)
def test_a_machine_has_the_instruction_sets_below_its_own(tmp_path: Path, isa: str) -> None:
    machine = machine_with(tmp_path, " ".join(KERNEL_FEATURES[isa]))
    assert machine.kernel_isas() == list(X86[: X86.index(isa) + 1])
    assert machine.obstacle_to_kernels() is None


def test_intels_pairs_of_bf16_are_slower_than_float32(tmp_path: Path) -> None:
    """Unless it has AMX, whose tiles are the fastest."""
    without, with_tiles = tmp_path / "without", tmp_path / "with"
    for folder in (without, with_tiles):
        folder.mkdir()
    features = " ".join(KERNEL_FEATURES["avx512_bf16"])
    machine = machine_with(without, features, vendor="GenuineIntel")
    assert machine.kernel_isas() == ["avx2", "avx512_bf16", "avx512"]
    features = " ".join(KERNEL_FEATURES["amx"])
    machine = machine_with(with_tiles, features, vendor="GenuineIntel")
    assert machine.kernel_isas()[-1] == "amx"


@pytest.mark.parametrize("isa", ARM)
def test_an_arm_machine_has_the_instruction_sets_below_its_own(tmp_path: Path, isa: str) -> None:
    machine = arm_machine(tmp_path, "fp " + " ".join(KERNEL_FEATURES[isa]))
    assert machine.kernel_isas() == list(ARM[: ARM.index(isa) + 1])
    assert machine.obstacle_to_kernels() is None
    assert machine.cpu_features() == list(KERNEL_FEATURES[isa])


def test_an_arm_processor_is_named_by_its_part(tmp_path: Path) -> None:
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    for folder in (known, unknown):
        folder.mkdir()
    assert arm_machine(known, "fp").cpu_name() == "ARM Neoverse V1"
    other = arm_machine(unknown, "fp", part="0xfff")
    assert other.cpu_name() == "ARM processor 0xfff of maker 0x41"


def test_an_old_arm_machine_says_what_it_lacks(tmp_path: Path) -> None:
    machine = arm_machine(tmp_path, "fp asimd evtstrm aes crc32")
    assert machine.kernel_isas() == []
    assert machine.obstacle_to_kernels() == "the processor has no atomics, asimddp"


def test_instruction_sets_of_another_architecture_are_refused_by_name(tmp_path: Path) -> None:
    x86, arm, old = tmp_path / "x86", tmp_path / "arm", tmp_path / "old"
    for folder in (x86, arm, old):
        folder.mkdir()
    here = machine_with(x86, " ".join(KERNEL_FEATURES["avx512"]))
    assert here.obstacle_to_kernels("neon_bf16") == (
        "the processor is x86-64, without neon_bf16; it has avx2, avx512"
    )
    assert arm_machine(arm, " ".join(KERNEL_FEATURES["neon"])).obstacle_to_kernels("amx") == (
        "the processor is AArch64, without amx; it has neon"
    )
    assert machine_with(old, "sse4_2").obstacle_to_kernels("neon") == (
        "the processor is x86-64, without neon; it has none that the kernels use"
    )


def test_a_machine_says_what_it_lacks(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "sse4_2 avx2 f16c avx512f")
    assert machine.kernel_isas() == []
    assert machine.obstacle_to_kernels() == "the processor has no fma"
    assert machine.obstacle_to_kernels("avx512") == (
        "the processor has no fma, avx512bw, avx512dq, avx512vl, avx512_vnni"
    )


@needs_kernels
def test_auto_is_the_fastest() -> None:
    assert load_library().isa.name == Machine().kernel_isas()[-1]


@needs_kernels
@pytest.mark.parametrize("name", isas(twins=True))
def test_every_instruction_set_of_this_machine_can_be_chosen(name: str) -> None:
    with computing_with(name) as library:
        chosen = Extension(library.extension_current())
        assert library.isa.name == name
        assert chosen in library.isa.extensions
        assert not library.extension_choose(17)


@needs_kernels
def test_the_library_finds_what_the_system_names() -> None:
    found, named = load_library().instructions(), Machine().cpu_features()
    for isa in set(KERNEL_ISAS) - {"amx"}:
        assert (ISAS[isa].instructions in found) == (isa in Machine().kernel_isas())
    assert (CpuInstructions.AVX_VNNI in found) == ("avx_vnni" in named)
    if CpuInstructions.AMX in found:  # a system may have it and not allow it
        assert "amx" in Machine().kernel_isas()


@needs_kernels
def test_kernels_are_not_run_where_the_library_finds_no_instructions_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Library, "instructions", lambda _: CpuInstructions.AVX2)
    assert load_library().isa.name == "avx2"


@needs_kernels
def test_a_processor_that_lacks_an_extension_refuses_it() -> None:
    """Refuse by the library's own detection, whatever /proc says."""
    missing = set(KERNEL_ISAS) - set(Machine().kernel_isas())
    if "amx" not in missing or "avx512_bf16" in missing:
        pytest.skip("the processor has AMX, or not AVX-512 with BF16")
    with computing_with("avx512_bf16") as library:
        assert not library.extension_choose(Extension.OWN)
        assert library.extension_current() == Extension.NONE


@needs_kernels
def test_an_operating_system_may_refuse_what_the_processor_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Library, "choose", lambda self: self.isa.name == "avx2")
    assert load_library().isa.name == "avx2"
    monkeypatch.setattr(Library, "choose", lambda self: False)
    with pytest.raises(LibraryBuildError, match="its system doesn't allow avx2"):
        load_library("avx2")


def test_a_library_is_opened_for_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_libraries", {})
    monkeypatch.setattr(Machine, "cpu_features", lambda _: ["avx2"])
    for isa, lacks in (("auto", "fma, f16c"), ("avx2", "fma, f16c"), ("amx", "fma, .*, amx_int8")):
        with pytest.raises(LibraryBuildError, match=f"^the processor has no {lacks}$"):
            load_library(isa)


@pytest.mark.skipif(compiler_version() is None, reason="no C++ compiler")
def test_one_library_holds_several_instruction_sets(tmp_path: Path) -> None:
    """Compile a file with a function of its own for each, and one that all share."""
    (tmp_path / "detection.cpp").write_text("int shared() { return 40; }\n")
    (tmp_path / "kernel.cpp").write_text(
        "int shared();\n"
        "namespace TRIOSERVE_ISA {\n"
        "#ifdef __AVX512F__\nint own() { return shared() + 2; }\n"
        "#else\nint own() { return shared() + 1; }\n#endif\n"
        "}\n"
        "#define JOIN(a, b) a##_##b\n#define NAME(a, b) JOIN(a, b)\n"
        'extern "C" int NAME(TRIOSERVE_ISA, extension_choose)(int) { return 1; }\n'
        'extern "C" int NAME(TRIOSERVE_ISA, number)() { return TRIOSERVE_ISA::own(); }\n'
    )
    seen: list[tuple[int, int]] = []
    compile_library(
        ["avx2", "avx512"],
        tmp_path / "all.so",
        sources=tmp_path,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    numbers = [Library(tmp_path / "all.so", ISAS[isa]).number() for isa in ("avx2", "avx512")]
    assert numbers == [41, 42]
    assert seen[-1] == (3, 3)
    assert not list(tmp_path.glob(".all-*"))
