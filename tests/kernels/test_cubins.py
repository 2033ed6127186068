"""The cache of built kernels, and what a build's name depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import attrs
import pytest

from gpu.kernels import FOLDER, KernelSource, nvrtc, parameters, sass
from gpu.kernels.cubins import CubinCache, build_all, default_folder
from gpu.kernels.nvrtc import Build, KernelBuildError
from gpu.kernels.targets import TARGETS, target_for

KERNEL = """\
#include "outer.cuh"
struct Parameters { float* y; };
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);
extern "C" __global__ void __launch_bounds__(NUM_THREADS) fill(const Parameters p) {
  __shared__ float values[NUM_THREADS];
  values[threadIdx.x] = VALUE;
  __syncthreads();
  p.y[threadIdx.x] = values[NUM_THREADS - 1 - threadIdx.x];
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels with one of them, which includes two headers of three."""
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / "fill.cu").write_text(KERNEL)
    (sources / "outer.cuh").write_text('#pragma once\n  # include "inner.cuh"\n')
    (sources / "inner.cuh").write_text("#pragma once\n#define VALUE WANTED\n")
    (sources / "other.cuh").write_text("#error\n")
    monkeypatch.setattr(nvrtc, "FOLDER", sources)
    return sources


@pytest.fixture
def source(folder: Path) -> KernelSource:
    return KernelSource(
        name="fill",
        parameters=parameters(("y", "u8")),
        num_threads=64,
        defines=(("WANTED", 1),),
        file=str(folder / "fill.cu"),
    )


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cache")


def digest(source: KernelSource, target: str = "sm_90") -> str:
    return nvrtc.unit(source, target).digest


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the targets of all builds from now on."""
    built, build = [], nvrtc.build

    def counted(unit: nvrtc.Unit) -> Build:
        built.append(unit.target)
        return build(unit)

    monkeypatch.setattr(nvrtc, "build", counted)
    return built


def test_a_build_says_what_the_kernel_costs(source: KernelSource) -> None:
    built = nvrtc.build(nvrtc.unit(source, "sm_90"))
    assert built.usage.static_shared == 64 * 4
    assert 0 < built.usage.registers <= 16
    assert (built.usage.stack, built.usage.spills) == (0, 0)


@pytest.mark.parametrize("target", TARGETS)
def test_a_cubin_is_whole_and_its_instructions_are_read(target: str, source: KernelSource) -> None:
    cubins = [nvrtc.build(nvrtc.unit(source, target)).cubin] * 2
    first, second = sass.disassemble(cubins, target)
    assert first == second
    assert first.like("BAR") == 1
    assert first.like("STS") >= 1
    assert first.like("HMMA") == 0


def test_a_cubin_has_its_last_byte(source: KernelSource, tmp_path: Path) -> None:
    cubin = nvrtc.build(nvrtc.unit(source, "sm_90")).cubin
    accepted = []
    for data in (cubin, cubin[:-1]):
        (tmp_path / "k.cubin").write_bytes(data)
        done = subprocess.run(
            [sass.nvdisasm(), "-c", tmp_path / "k.cubin"], capture_output=True, check=False
        )
        accepted.append(done.returncode == 0)
    assert accepted == [True, False]


def test_the_report_of_spills_is_read() -> None:
    log = (
        "ptxas info    : Function properties for k\n"
        "ptxas         .     40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, "
        "1024 bytes smem\n"
    )
    usage = nvrtc.usage_in(log)
    assert usage == nvrtc.KernelUsage(registers=255, stack=40, spills=80, static_shared=1024)
    with pytest.raises(KernelBuildError, match="no report"):
        nvrtc.usage_in("")


def test_the_digest_changes_with_all_that_changes_a_build(
    source: KernelSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {digest(source)}

    def is_new(found: str) -> bool:
        new = found not in seen
        seen.add(found)
        return new

    assert not is_new(digest(source))
    assert is_new(digest(source, "sm_90a"))
    assert is_new(digest(attrs.evolve(source, defines=(("WANTED", 2),))))
    assert is_new(digest(attrs.evolve(source, num_threads=32)))
    assert is_new(digest(attrs.evolve(source, parameters=parameters(("y", "u8"), ("z", "u8")))))
    assert is_new(digest(attrs.evolve(source, name="filled")))
    for file in ("fill.cu", "inner.cuh", "outer.cuh"):
        (folder / file).write_text((folder / file).read_text() + "\n")
        assert is_new(digest(source)), file
    (folder / "other.cuh").write_text("not included")
    assert not is_new(digest(source))
    monkeypatch.setattr(nvrtc, "compiler", lambda: "NVRTC 99.0")
    assert is_new(digest(source))
    monkeypatch.setattr(nvrtc, "options", lambda source, target: ("--gpu-architecture=sm_90",))
    assert is_new(digest(source))


def test_dynamic_shared_memory_needs_no_build_of_its_own(source: KernelSource) -> None:
    assert digest(source) == digest(attrs.evolve(source, shared_bytes=1024))


def test_a_kernel_is_built_once_and_read_by_others(
    source: KernelSource, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = count_builds(monkeypatch)
    first = cache.get(source, "sm_90")
    assert CubinCache(cache.folder).get(source, "sm_90") == first
    assert built == ["sm_90"]
    cache.get(source, "sm_80")
    assert built == ["sm_90", "sm_80"]
    assert cache.statistics() == (2, sum(p.stat().st_size for p in cache.folder.glob("*.cubin")))
    assert not list(cache.folder.glob(".*"))


@pytest.mark.parametrize("ending", ["cubin", "json"])
@pytest.mark.parametrize("damage", ["shorter", "empty", "other", "gone"])
def test_a_damaged_file_is_built_again(
    ending: str,
    damage: str,
    source: KernelSource,
    cache: CubinCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = cache.get(source, "sm_90")
    (file,) = cache.folder.glob(f"*.{ending}")
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"shorter": data[:-1], "empty": b"", "other": b"[]"}[damage])
    built = count_builds(monkeypatch)
    assert cache.get(source, "sm_90") == first
    assert built == ["sm_90"]
    assert file.read_bytes() == data
    cache.get(source, "sm_90")
    assert built == ["sm_90"]


def test_a_folder_that_cannot_be_written_is_no_failure(
    source: KernelSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "kernels")
    assert cache.get(source, "sm_90").cubin
    assert "can't be written" in caplog.text
    assert cache.statistics() == (0, 0)


def test_the_folder_follows_the_desktops_convention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "trioserve" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_folder() == Path(os.environ["HOME"]) / ".cache" / "trioserve" / "kernels"


def test_many_are_built_at_once_in_order_and_failures_are_results(
    source: KernelSource, cache: CubinCache
) -> None:
    bad = attrs.evolve(source, defines=(("WANTED", "nonsense"),))
    wanted = [(source, "sm_90"), (bad, "sm_90"), (source, "sm_80"), (source, "sm_120")]
    heard: list[tuple[int, int]] = []
    outcomes = build_all(cache, wanted, 2, lambda done, total: heard.append((done, total)))
    assert [(each.source, each.target) for each in outcomes] == wanted
    assert [isinstance(each.result, Build) for each in outcomes] == [True, False, True, True]
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_failed_build_shows_the_first_errors(source: KernelSource, folder: Path) -> None:
    (folder / "fill.cu").write_text("#warning first\n" + "int x = nonsense;\n" * 50)
    with pytest.raises(KernelBuildError) as caught:
        nvrtc.build(nvrtc.unit(source, "sm_90"))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("fill<WANTED=1> for sm_90: fill.cu(2): error: ")
    assert 10 < len(lines) < 20
    assert lines[-1].endswith("more lines")


def test_only_the_folder_of_kernels_is_searched_for_headers(
    source: KernelSource, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(FOLDER / "hardware.cuh", tmp_path / "stray.cuh")
    monkeypatch.chdir(tmp_path)
    (folder / "fill.cu").write_text('#include "stray.cuh"\n')
    with pytest.raises(KernelBuildError, match=r"stray\.cuh"):
        nvrtc.build(nvrtc.unit(source, "sm_90"))


def test_without_cupy_the_error_says_what_to_install(
    source: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    nvrtc._nvrtc.cache_clear()
    nvrtc.version.cache_clear()
    nvrtc.compiler.cache_clear()
    monkeypatch.setattr("gpu.kernels.nvrtc.importlib.import_module", missing)
    with pytest.raises(KernelBuildError, match=r"pip install '\.\[cuda13\]'"):
        nvrtc.unit(source, "sm_90")


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_103"),
        ((10, 9), "sm_103"),
        ((12, 1), "sm_121"),
    ],
)
def test_a_gpu_gets_code_of_its_own_or_of_the_nearest_before(
    capability: tuple[int, int], target: str
) -> None:
    assert target_for(capability, (75, 80, 86, 89, 90, 100, 103, 120, 121)) == target


@pytest.mark.parametrize(
    ("capability", "said"),
    [((7, 5), r"7\.5 is too old: 8\.0"), ((13, 0), r"12\.1 at most, this GPU has 13\.0")],
)
def test_a_gpu_that_is_too_old_or_too_new_is_named(capability: tuple[int, int], said: str) -> None:
    with pytest.raises(KernelBuildError, match=said):
        target_for(capability, (75, 80, 90, 120, 121))
